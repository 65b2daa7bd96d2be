"""Copies between host and device, on CUDA if available."""

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pytest
import torch

from services.errors import ConfigError
from services.llm.engine.device import DeviceStream, HostCopy, draw_unused, to_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_arrays_are_the_same_after_a_round_trip() -> None:
    """Arrays of all dtypes of a step, empty arrays and empty lists survive the round trip."""
    arrays = [np.arange(5), np.zeros(0, dtype=np.int64), np.array([True, False]), np.ones((2, 3), dtype=np.float32)]

    back = HostCopy([to_device(array, DEVICE) for array in arrays]).arrays()

    assert [array.dtype for array in back] == [array.dtype for array in arrays]
    assert all(np.array_equal(array, restored) for array, restored in zip(arrays, back, strict=True))
    assert HostCopy([]).arrays() == []


@dataclass
class Stream:
    """A stream of torch's pool."""

    cuda_stream: int
    device_index: int = 0


def test_no_two_engines_share_a_stream() -> None:
    """Streams in use are skipped in torch's rotating pool; if all are in use, the error says so."""
    pool = cycle(map(Stream, range(32)))
    in_use = {(0, number) for number in range(3)}

    drawn = [draw_unused(lambda: next(pool), in_use) for _ in range(40)]

    assert {stream.cuda_stream for stream in drawn} == set(range(3, 32))
    with pytest.raises(ConfigError, match="engines on one card"):
        draw_unused(lambda: Stream(1), in_use)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_of_a_card_differ_while_they_are_used() -> None:
    """A stream stays unique for any number of streams drawn in between."""
    kept = DeviceStream(DEVICE)
    others = [DeviceStream(DEVICE)._stream.cuda_stream for _ in range(70)]

    assert kept._stream.cuda_stream not in others
