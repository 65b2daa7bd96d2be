"""A bundle that was made of items alone: popular and similar items are answered, no model is asked, and the first trained one takes over."""

from pathlib import Path

import pytest

from models.registry import BundleStore
from services.contracts.features import UserFeatures
from services.contracts.recommend import Reason, SimilarTo, Tier
from services.contracts.rules import Rules
from tests.unit.gateway.world import VERSION, catalogue_of, publish, started_world


@pytest.mark.parametrize("user_id", ["listed", "long", "short", "nobody"])
async def test_without_models_every_user_gets_popular_items(tmp_path: Path, user_id: str) -> None:
    """With the reason, without what they have seen, and without a call to student or LLM."""
    async with started_world(tmp_path, about={"trained": False}) as world:
        answer = await world.recommend(user_id)
        seen = world.features.users.get(user_id, UserFeatures()).history_item_ids

        assert (answer.tier, answer.reason) == (Tier.POPULAR, Reason.NOT_TRAINED)
        assert len(answer.items) == 3
        assert not {item.item_id for item in answer.items} & set(seen)
        assert not [one for one in world.llm.requests if one.request_id != "warm-up"]


async def test_without_models_similar_items_and_rules_answer(tmp_path: Path) -> None:
    """Diversity by item vectors, of which there are none, harms nothing."""
    async with started_world(tmp_path, about={"trained": False}) as world:
        similar = await world.recommend(subject=SimilarTo(("i04",)))
        diverse = await world.recommend(rules=Rules(diversity=0.5))

        assert (similar.tier, [item.item_id for item in similar.items]) == (Tier.SIMILAR, ["i05", "i06", "i07"])
        assert (diverse.tier, len(diverse.items)) == (Tier.POPULAR, 3)


async def test_the_first_trained_bundle_takes_over(tmp_path: Path) -> None:
    """And a rollback to the one without models is answered from it again."""
    async with started_world(tmp_path, about={"trained": False}) as world:
        before = await world.recommend()
        publish(tmp_path / "bundles", "v2", catalogue_of())
        await world.plane.names.first.refresh()
        trained = await world.recommend()
        BundleStore(tmp_path / "bundles").rollback()
        await world.plane.names.first.refresh()
        after = await world.recommend()

        assert trained.tier is Tier.STUDENT  # the LLM of these tests serves another version
        assert [one.bundle_version for one in (before, trained, after)] == [VERSION, "v2", VERSION]
        assert after.reason is Reason.NOT_TRAINED
