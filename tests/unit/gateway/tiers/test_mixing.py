"""The student and LLM tiers of a bundle with a mixer, and their explanation."""

import math
from pathlib import Path
from typing import Any

import pytest

from services.contracts.explanation import decode_explanation
from services.gateway.records.explanations import _FACT_NAMES
from tests.unit.gateway.world import started_world


def about(model: str, weights: dict[str, float]) -> dict[str, Any]:
    """Return a manifest's mixer with one source: the ring, where the next items score 0.75, 0.5 and 0.25."""
    sources = {"similar": {"newest": 2, "decay": 0.5}}
    return {"mixer": {"sources": sources, "blends": {model: [{"history": [0, None], "weights": weights}]}}}


@pytest.mark.parametrize(
    ("model", "user_id", "weights", "tier", "first"),
    [
        ("student", "short", {"similar": 1.0}, "student", ["i01", "i02", "i03"]),
        ("student", "short", {"model": 1.0, "similar": 1.0}, "student", ["i01", "i02", "i03"]),
        ("decoder", "long", {"model": 1.0, "similar": 9.0}, "llm", ["i04", "i05", "i06"]),
        ("decoder", "long", {"similar": 1.0}, "llm", ["i04", "i05", "i06"]),
    ],
)
async def test_a_tier_answers_with_the_mix_and_explains_it(
    tmp_path: Path, model: str, user_id: str, weights: dict[str, float], tier: str, first: list[str]
) -> None:
    """The sources' items come first; the parts of each item in the explanation sum to its score."""
    async with started_world(tmp_path, about=about(model, weights)) as world:
        answer = await world.recommend(user_id, request_id="r")
        await world.plane.explanations.flush()

        assert (answer.tier, [item.item_id for item in answer.items]) == (tier, first)
        mixed = decode_explanation(world.shelf.records["r"], _FACT_NAMES).mixed
        assert [item.item_id for item in mixed[:3]] == first
        assert [item.score for item in mixed[:3]] == pytest.approx([math.exp(item.score) for item in answer.items])
        for item in mixed:
            assert sum(item.by_source.values()) == pytest.approx(item.score)
        assert (mixed[0].by_source["model"] > 1e-9) == ("model" in weights)


async def test_a_tier_without_a_blend_serves_its_model(tmp_path: Path) -> None:
    """A blend of the decoder does not change the student's ranking; its explanation has no parts."""
    async with started_world(tmp_path, about=about("decoder", {"similar": 1.0})) as world:
        world.student.order = [7, 9]
        answer = await world.recommend("short", request_id="r", k=2)
        await world.plane.explanations.flush()

        assert [item.item_id for item in answer.items] == ["i07", "i09"]
        assert decode_explanation(world.shelf.records["r"], _FACT_NAMES).mixed == ()
