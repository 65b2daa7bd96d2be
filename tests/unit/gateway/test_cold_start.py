"""A bundle without models serves popular and similar items until the first trained bundle takes over."""

from pathlib import Path

import pytest

from models.registry.store import BundleStore
from services.contracts.features import UserFeatures
from services.contracts.recommend import Reason, SimilarTo, Tier
from services.contracts.rules import Rules
from tests.unit.gateway.world import VERSION, catalogue_of, publish, started_world


@pytest.mark.parametrize("user_id", ["listed", "long", "short", "nobody"])
async def test_without_models_every_user_gets_popular_items(tmp_path: Path, user_id: str) -> None:
    """The answer has the reason, excludes seen items, and calls neither student nor LLM."""
    async with started_world(tmp_path, about={"trained": False}) as world:
        answer = await world.recommend(user_id)
        seen = world.features.users.get(user_id, UserFeatures()).history_item_ids

        assert (answer.tier, answer.reason) == (Tier.POPULAR, Reason.NOT_TRAINED)
        assert len(answer.items) == 3
        assert not {item.item_id for item in answer.items} & set(seen)
        assert not [request for request in world.llm.requests if request.request_id != "warm-up"]


async def test_without_models_similar_items_and_rules_answer(tmp_path: Path) -> None:
    """Similar items are answered, and diversity has no effect without item vectors."""
    async with started_world(tmp_path, about={"trained": False}) as world:
        similar = await world.recommend(subject=SimilarTo(("i04",)))
        diverse = await world.recommend(rules=Rules(diversity=0.5))

        assert (similar.tier, [item.item_id for item in similar.items]) == (Tier.SIMILAR, ["i05", "i06", "i07"])
        assert (diverse.tier, len(diverse.items)) == (Tier.POPULAR, 3)


async def test_the_first_trained_bundle_takes_over(tmp_path: Path) -> None:
    """The trained bundle takes over, and a rollback returns to the bundle without models."""
    async with started_world(tmp_path, about={"trained": False}) as world:
        before = await world.recommend()
        publish(tmp_path / "bundles", "v2", catalogue_of())
        await world.plane.names.first.refresh()
        trained = await world.recommend()
        BundleStore(tmp_path / "bundles").rollback()
        await world.plane.names.first.refresh()
        after = await world.recommend()

        assert trained.tier is Tier.STUDENT  # the fake LLM serves another version
        assert [answer.bundle_version for answer in (before, trained, after)] == [VERSION, "v2", VERSION]
        assert after.reason is Reason.NOT_TRAINED
