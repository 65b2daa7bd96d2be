"""An engine on Triton kernels and recorded steps, as on a GPU, in Triton's interpreter on a CPU."""

import numpy as np
import pytest

from services.llm.engine import runner
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.gpu.forward import triton_forward
from services.llm.engine.outcome import EngineOutcome
from tests.support.engine.engine_scripts import assert_same_answers
from tests.support.engine.engines import build_decoder, build_items, drain
from tests.support.engine.replaying_device import ReplayingDevice

pytestmark = pytest.mark.native

CONFIG = EngineConfig(
    num_blocks=20,
    block_tokens=4,
    max_running=2,
    max_num_batched_tokens=16,
    max_beam_rows=8,
    tile_tokens=64,
    cpu_kernels="torch",
)


def outcomes_of(device: ReplayingDevice | None) -> tuple[dict[str, EngineOutcome], Engine]:
    """Run two rankings and two texts concurrently."""
    items = build_items(2)
    engine = Engine(build_decoder(items, layers=1), CONFIG, items=items, bundle_version="v1", graph_device=device)
    engine.warm_up()
    engine.add_rank("wide", [3, 1, 4], k=5, excluded=np.arange(9), beam_width=7)
    engine.add_text("long", [2, 7, 1, 8, 2], max_new_tokens=3)
    engine.add_rank("narrow", [9, 9], k=2, beam_width=2)
    engine.add_text("short", [6], max_new_tokens=2)
    return drain(engine), engine


def test_an_engine_of_kernels_and_graphs_gives_what_plain_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items, scores and texts agree, every step is a replay, and no step falls back to eager mode."""
    wanted, _ = outcomes_of(None)
    monkeypatch.setattr(runner, "cpu_forward", lambda weights, cache, *_: triton_forward(weights, cache))
    device = ReplayingDevice()

    outcomes, engine = outcomes_of(device)

    assert_same_answers(outcomes, wanted)
    assert device.num_replays >= 5
    assert engine.graph_counts.late_captures == engine.graph_counts.eager_fallbacks == 0
