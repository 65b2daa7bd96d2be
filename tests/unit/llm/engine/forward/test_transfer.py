"""Copies between host and device, on the device that there is."""

import numpy as np
import torch

from services.llm.engine.forward.transfer import HostCopy, to_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_arrays_survive_the_way_to_the_device_and_back() -> None:
    """All dtypes that steps use, empty arrays too, there and back."""
    arrays = [np.arange(5), np.zeros(0, dtype=np.int64), np.array([True, False]), np.ones((2, 3), dtype=np.float32)]

    back = HostCopy([to_device(array, DEVICE) for array in arrays]).arrays()

    assert [array.dtype for array in back] == [array.dtype for array in arrays]
    assert all(np.array_equal(array, one) for array, one in zip(arrays, back, strict=True))


def test_a_copy_of_nothing_is_empty() -> None:
    """A step that completes no ranking copies none."""
    assert HostCopy([]).arrays() == []
