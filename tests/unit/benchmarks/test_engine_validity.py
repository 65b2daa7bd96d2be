"""The count of invalid items: 0 on a short run across reloads, and a wrong item is seen."""

import numpy as np

from benchmarks.engine_curves import random_items
from benchmarks.engine_validity import Count, Served, judged
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import EngineOutcome, Status
from tests.unit.llm.engine.conftest import build_decoder


def test_every_beam_is_a_valid_item() -> None:
    """Across reloads, depths, masks and widths every item is allowed, unseen, returned once, and none is missing."""
    count = Count()

    assert sum(judged(8_000, count)) == count.beams

    assert count.beams >= 8_000
    assert count.catalogues >= 2
    assert (count.invalid, count.repeated, count.short) == (0, 0, 0)


def test_a_wrong_answer_is_counted() -> None:
    """An item seen, an item twice and a list that is too short are each counted."""
    items = random_items(30, 2)
    engine = Engine(build_decoder(items), EngineConfig(), items=items, bundle_version="v")
    shown = np.ones(30, dtype=bool)
    shown[4] = False
    served, count = Served(engine, items, {"a": (shown, 9)}), Count()

    served.judge(outcome_of("a", [4, 7, 7]), count)

    assert (count.invalid, count.repeated, count.short) == (1, 1, 1)


def outcome_of(name: str, found: list[int]) -> EngineOutcome:
    """Build a finished ranking of these items."""
    return EngineOutcome(
        request_id=name,
        status=Status.DONE,
        item_indices=np.array(found),
        scores=np.zeros(len(found), dtype=np.float32),
        tokens=(),
        num_prompt_tokens=1,
        num_cached_tokens=0,
        arrival_s=0.0,
        started_s=0.0,
    )
