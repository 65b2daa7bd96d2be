"""A release on the whole stack: assignment of users, and automatic rollback."""

import random
from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.release.candidates import failing, publish_changed
from models.registry.store import BundleStore
from services.contracts import recommend_pb2 as pb
from services.contracts.experiments import place_of
from tests.support.stacks.stack import Stack
from tests.support.wait import wait_for

CANDIDATE = "fails-often"


@pytest.fixture
def store(stack: Stack) -> Iterator[BundleStore]:
    """The stack's bundles with a version whose student fails for every fourth item; it is removed afterwards."""
    store = BundleStore.of(stack.settings)
    publish_changed(store, store.live(), CANDIDATE, partial(failing, one_of=4))
    yield store
    if (canary := store.record().canary) is not None:
        store.end_canary(canary.version, note="the test is over")


def test_a_release_is_the_hash_s_at_both_doors_and_is_rolled_back_when_it_fails(
    stack: Stack, store: BundleStore
) -> None:
    """Half of the users get the candidate over REST and gRPC; after many student failures it is withdrawn for all."""
    begun = stack.command("release", CANDIDATE, "--share", "50%", "--no-lists")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    canary = store.record().canary
    live = store.live_version()
    assert canary is not None
    user_number = next(number for number in range(1_000) if place_of(canary.salt, f"release-{number}") < 0.5)
    wait_for(
        lambda: stack.recommend(f"release-{user_number}", k=3)["bundle_version"] == CANDIDATE, what="the candidate"
    )
    items = store.live().item_ids()
    draw = random.Random(0)

    for number in range(400):
        user_id, recent = f"release-{number}", [draw.choice(items)]
        rest = stack.recommend(user_id, k=3, recent_item_ids=recent)
        rpc = stack.rpc.Recommend(pb.RecommendRequest(user_id=user_id, k=3, recent_item_ids=recent))
        if store.record().canary is None:
            break
        right = CANDIDATE if place_of(canary.salt, user_id) < 0.5 else live
        assert (rest["bundle_version"], rpc.bundle_version) == (right, right)

    wait_for(lambda: store.record().canary is None, what="the rollback")
    assert "errors worse" in store.withdrawals()[CANDIDATE].reason
    assert ": fails-often: " in stack.command("release").stdout
    wait_for(lambda: stack.recommend(f"release-{user_number}", k=3)["bundle_version"] == live, what="the live version")
