"""Copies between host and device, on CUDA where there is one."""

import numpy as np
import torch

from services.llm.engine.device import HostCopy, to_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_arrays_are_the_same_after_a_round_trip() -> None:
    """All dtypes that steps use, empty arrays and no array at all."""
    arrays = [np.arange(5), np.zeros(0, dtype=np.int64), np.array([True, False]), np.ones((2, 3), dtype=np.float32)]

    back = HostCopy([to_device(array, DEVICE) for array in arrays]).arrays()

    assert [array.dtype for array in back] == [array.dtype for array in arrays]
    assert all(np.array_equal(array, one) for array, one in zip(arrays, back, strict=True))
    assert HostCopy([]).arrays() == []
