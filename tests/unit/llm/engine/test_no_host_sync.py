"""Steps do not wait for the device (tensors of the meta device cannot be read), nor engines for each other."""

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from tests.support.engine.engine_scripts import SAMPLINGS, EvenAndOdd
from tests.support.engine.engines import build_decoder, build_engine, build_items
from tests.support.engine.replaying_device import ReplayingDevice

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_is_read_from_the_device_before_the_ranking_is_complete(depth) -> None:
    """Only the last step's copy reads from the device; any earlier read would fail."""
    items = build_items(depth)
    engine = build_engine(build_decoder(items).to("meta"), items)
    engine.add_rank("wide", [0, 1, 2, 3], k=20, beam_width=30, excluded=[4, 7])
    engine.add_rank("narrow", [0, 1], k=3, beam_width=3)

    for _ in range(depth - 1):
        engine.step(0.0)

    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as copied:
        engine.step(0.0)
    assert "arrays" in [frame.name for frame in copied.traceback]


def test_a_step_with_every_kind_of_text_is_started_without_a_read() -> None:
    """With any sampling settings, the first read happens in the call that collects the step."""
    items = build_items(2)
    engine = build_engine(build_decoder(items).to("meta"), items, is_asynchronous=True)
    for index, sampling in enumerate(SAMPLINGS):
        engine.add_text(f"{index}", [1, 2, 3 + index], max_new_tokens=4, sampling=sampling)
    engine.add_text("held", [1, 2], max_new_tokens=4, mask=EvenAndOdd())
    engine.add_rank("rank", [0, 1, 2, 3], k=20, beam_width=30, excluded=[4, 7])

    engine.step(0.0)

    assert engine.is_ahead
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as copied:
        engine.step(0.0)
    assert "arrays" in [frame.name for frame in copied.traceback]


class NamedStream:
    """A replacement for a CUDA stream: the current stream of a thread, by name."""

    current = threading.local()

    def __init__(self, device: torch.device) -> None:
        self.name = object()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the thread's current stream."""
        before, self.current.name = getattr(self.current, "name", None), self.name
        yield
        self.current.name = before

    def mark(self) -> None:
        """Do nothing: bodies run immediately."""

    def follow(self, others: Iterable[object]) -> None:
        """Do nothing."""


class StreamedDevice(ReplayingDevice):
    """Records the streams on which bodies run, in captures and in replays."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: set[object] = set()

    def capture(self, body, inputs):
        """Capture a body that records its stream."""

        def noting():
            self.streams.add(getattr(NamedStream.current, "name", None))
            return body()

        return super().capture(noting, inputs)


def test_an_engine_that_is_made_ready_shares_no_stream_with_the_one_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that is warmed up uses its own stream, so the serving engine does not wait for captures.

    One engine ranks in its thread while another engine is built and warmed up.
    """
    monkeypatch.setattr("services.llm.engine.engine.DeviceStream", NamedStream)
    devices, items = [StreamedDevice(), StreamedDevice()], build_items(2)
    config = EngineConfig(num_blocks=64, cpu_kernels="torch", max_running=1, max_num_batched_tokens=16, max_beam_rows=8)

    def build(device: StreamedDevice) -> Engine:
        engine = Engine(build_decoder(items), config, items=items, bundle_version="v", graph_device=device)
        engine.warm_up()
        return engine

    serving = build(devices[0])
    loader = threading.Thread(target=build, args=(devices[1],))
    loader.start()
    for request in range(8):
        serving.add_rank(f"{request}", [1, 2, 3], k=3)
        while serving.has_work:
            serving.step(0.0)
    loader.join()

    assert devices[0].num_replays > 0
    assert devices[0].streams == {serving.stream.name}
    assert len(devices[1].streams) == 1
    assert devices[1].streams.isdisjoint({None, serving.stream.name})


def test_no_engine_waits_for_the_whole_device() -> None:
    """Calls that synchronise a device or release its memory stall every engine on it, so none occur after startup."""
    stopping = r"cuda\.(synchronize|empty_cache|graph|device_synchronize)\("
    sources = {path.name: path.read_text() for path in (ROOT / "services/llm").rglob("*.py")}

    calls = [(name, call) for name, source in sources.items() for call in re.findall(stopping, source)]
    assert len(sources) > 50
    assert calls == [("card.py", "empty_cache")]
