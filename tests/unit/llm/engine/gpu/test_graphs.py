"""Captured and replayed steps of an engine; test_mixed_requests checks that outcomes of any mix are equal."""

import gc
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from services.llm.engine.engine import Engine
from services.llm.engine.gpu.graph_device import Body, CudaGraphDevice
from services.llm.engine.gpu.graph_shapes import sizes_up_to
from services.llm.engine.gpu.step_table import StepTable
from tests.support.engine.engine_scripts import EvenAndOdd, World, assert_same_answers, prompt_of
from tests.support.engine.engines import drain
from tests.support.engine.replaying_device import ReplayedBody, ReplayingDevice


def both(depth: int, **changes: int) -> tuple[Engine, Engine, ReplayingDevice]:
    """Build the same engine with graphs, warmed up, and without graphs."""
    device, knobs = ReplayingDevice(), {"max_num_batched_tokens": 64, "max_chunk_tokens": 32} | changes
    return World(depth).engine(device, **knobs), World(depth).engine(**knobs), device


def test_all_levels_after_the_first_are_one_replay() -> None:
    """Two rankings of four levels take two steps: their prompts, then a single recording for three levels of both."""
    graphed, plain, device = both(4)

    for engine in (graphed, plain):
        for name, width in (("narrow", 3), ("wide", 8)):
            engine.add_rank(name, [1, 2, 3], k=4, beam_width=width)
    outcomes = {outcome.request_id: outcome for _ in range(2) for outcome in graphed.step(0.0)}

    assert_same_answers(outcomes, drain(plain))
    assert device.num_replays == 2


def test_token_masks_are_computed_while_the_device_runs() -> None:
    """The token mask is computed after the step has started, for the prefill and for each replay."""
    graphed, _, device = both(1)
    replays_at_call: list[int] = []

    class Noting(EvenAndOdd):
        """Records the number of replays so far."""

        def allowed(self) -> np.ndarray:
            replays_at_call.append(device.num_replays)
            return super().allowed()

    graphed.add_text("held", prompt_of(1), max_new_tokens=3, mask=Noting())
    drain(graphed)

    assert replays_at_call == [1, 2, 3]


def test_a_step_without_a_shape_runs_eagerly_and_is_counted() -> None:
    """A request wider than the widest shape runs eagerly with the same result, and the fallback is counted."""
    graphed, plain, _ = both(2, max_beam_rows=16)

    for engine in (graphed, plain):
        engine.add_rank("wide", prompt_of(1), k=40, beam_width=16)

    assert_same_answers(drain(graphed), drain(plain))
    assert graphed.graph_counts.eager_fallbacks == 1
    assert graphed.graph_counts.late_captures == 0


def test_shapes_are_captured_once_before_or_late() -> None:
    """The warm-up reports each shape once; without a warm-up, the first step of a shape captures it late."""
    warm, late, progress = ReplayingDevice(), ReplayingDevice(), list[tuple[int, int]]()
    World(3).engine(warm, warms_up=False).warm_up(lambda done, total: progress.append((done, total)))
    engine = World(2).engine(late, warms_up=False)

    for name in ("first", "second"):
        engine.add_rank(name, prompt_of(1), k=5, beam_width=8)
        drain(engine)

    total = 2 * len(warm.recordings)
    assert progress == [(done, total) for done in range(1, total + 1)]
    assert engine.graph_counts.late_captures == len(late.recordings) == 1
    assert late.num_replays == 2


def test_an_operation_that_no_warm_up_ran_is_refused() -> None:
    """An operation that the warm-up did not run would load its kernel during the capture."""
    with pytest.raises(AssertionError, match=r"loaded during a capture: .*neg"):
        ReplayingDevice().capture(lambda: (torch.neg(torch.ones(2)),), [])


class LoggedGraph:
    """A graph that logs its calls."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def capture_end(self) -> None:
        self.log.append(f"end {self.name}")

    def replay(self) -> None:
        self.log.append(f"replay {self.name}")

    def reset(self) -> None:
        self.log.append(f"reset {self.name}")


class LoggedDriver:
    """A driver without a GPU."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_graphs = 0

    def new_graph(self) -> LoggedGraph:
        """Return an empty graph."""
        self.num_graphs += 1
        return LoggedGraph(str(self.num_graphs), self.log)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def begin(self, graph: LoggedGraph) -> None:
        """Log the start of a capture."""
        assert not gc.isenabled(), "a collection could end another engine's graphs"
        self.log.append(f"begin {graph.name}")


def test_graphs_of_an_engine_end_together_after_their_last_replay() -> None:
    """A graph whose capture failed is kept too, because destroying it would free the shared workspace."""
    driver = LoggedDriver()
    device = CudaGraphDevice(driver)

    def fails() -> tuple[torch.Tensor, ...]:
        raise ValueError("stop")

    first = device.capture(lambda: (torch.ones(1),), [])
    with pytest.raises(ValueError, match="stop"):
        device.capture(fails, [])
    first.replay()
    assert gc.isenabled()
    assert driver.log == ["synchronize", "begin 1", "end 1", "synchronize", "begin 2", "end 2", "replay 1"]
    driver.log.clear()
    del device

    assert driver.log == ["synchronize", "reset 1", "reset 2"]


def test_no_graph_is_captured_before_all_steps_are_warmed_up() -> None:
    """The device loads kernels during the warm-up and never between two captures."""
    calls: list[str] = []

    class Ordered(ReplayingDevice):
        """Records the order of calls."""

        def warm_up(self, body: Body) -> None:
            """Record and run the warm-up."""
            calls.append("warm up")
            super().warm_up(body)

        def capture(self, body: Body, inputs: Sequence[torch.Tensor]) -> ReplayedBody:
            """Record and run the capture."""
            calls.append("capture")
            return super().capture(body, inputs)

    World(2).engine(Ordered(), max_running=1, max_beam_rows=8, max_num_batched_tokens=16)

    assert calls == ["warm up"] * (len(calls) // 2) + ["capture"] * (len(calls) // 2)
    assert calls


@pytest.mark.parametrize(("change", "message"), [("input", "was replaced"), ("operation", "another way")])
def test_the_stand_in_replays_as_a_graph_does(change: str, message: str) -> None:
    """Replays read new contents of captured memory; other tensors or operations fail, and old inputs are spoiled."""
    inputs, operations = [torch.ones(2)], [torch.neg]
    device = ReplayingDevice()
    device.warm_up(lambda: (operations[-1](inputs[-1]),))
    recording = device.capture(lambda: (operations[-1](inputs[-1]),), inputs[:])
    inputs[0].fill_(4.0)
    replayed = [(recording.replay(), recording.outputs[0].tolist())[1] for _ in range(2)]
    inputs.append(torch.zeros(2)) if change == "input" else operations.append(torch.abs)

    assert replayed == [[-4.0, -4.0], [-1e9, -1e9]]
    with pytest.raises(AssertionError, match=message):
        recording.replay()


def test_sizes_round_up_to_powers_of_two_and_the_largest() -> None:
    """Every count up to the largest has a size of less than twice the count."""
    assert [sizes_up_to(largest) for largest in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_columns_of_a_step_begin_where_kernels_expect_them() -> None:
    """For any number of requests, each column starts at a multiple of 16 bytes."""
    table = StepTable(5, max_context=40, block_tokens=4, scratch_block=99, device=torch.device("cpu"))
    start = table.numbers.data_ptr()

    places = [column.data_ptr() - start for size in range(1, 6) for column in table.columns(size).values()]

    assert all(offset % 16 == 0 for offset in places)
