"""A shop with items but no events: `tailrace up --items` on an empty state folder, its answers, and its messages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stacks.stack import Stack, admitted, rest_items
from tests.support.wait import wait_for

SHELF = """\
item_id,title,categories,published_ms
lamp-1,Brass desk lamp,lighting,1790000001000
lamp-2,Brass floor lamp,lighting,1790000002000
lamp-3,Paper lantern,lighting,1790000003000
mug-1,Blue coffee mug,kitchen,1790000004000
mug-2,Blue tea mug,kitchen,1790000005000
pan-1,Iron pan,kitchen,1790000006000
rug-1,Wool rug,textiles,1790000007000
rug-2,Cotton rug,textiles,1790000008000
"""
NEWEST_FIRST = [row.partition(",")[0] for row in SHELF.splitlines()[:0:-1]]
pytestmark = (
    pytest.mark.grid
)  # tests/unit/gateway/test_live_catalogue.py and publication/test_cold_start.py hold its parts
USER, OTHER = "first-customer", "second-customer"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack started from only a CSV of items."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "items.csv").write_text(SHELF)
    shop = Stack(folder / "state", gateway_replicas=1)
    try:
        shop.start("--items", str(folder / "items.csv"))
        yield shop
    finally:
        shop.close()


def items_of(shop: Stack, path: str, **sent: object) -> list[str]:
    """Return the items of an answer that no model made."""
    answer = admitted(lambda: shop.rest.post(path, json={"deadline_ms": 2_000, **sent})).raise_for_status().json()
    return rest_items(answer)


def test_the_shop_answers_without_a_model(shop: Stack) -> None:
    """The first bundle has no models and says so; users get the newest items, and similar items similar texts."""
    popular = admitted(lambda: shop.rest.get("/v1/popular", params={"k": 8})).raise_for_status().json()
    answer = shop.known(OTHER, k=3, deadline_ms=2_000)
    similar = admitted(lambda: shop.rest.post("/v1/items/lamp-1/similar", json={"k": 2})).raise_for_status().json()

    assert "is live with 8 items and no models" in shop.output
    assert shop.rest.get("/v1/bundle").json()["manifest"]["trained"] is False
    assert rest_items(popular) == NEWEST_FIRST
    assert (answer["tier"], answer["reason"], rest_items(answer)) == ("popular", "not_trained", NEWEST_FIRST[:3])
    assert (similar["items"][0]["source"], rest_items(similar)[0]) == ("similar", "lamp-2")


def test_each_step_says_what_it_lacks(shop: Stack, tmp_path: Path) -> None:
    """Status, training and adding items report the missing events."""
    (tmp_path / "more.csv").write_text("item_id,title,categories\nlamp-4,Glass lamp,lighting\n")
    status = shop.command("status")
    trained = shop.command("pipeline", "--items", str(shop.settings.state_dir.parent / "items.csv"))
    added = shop.command("add-items", str(tmp_path / "more.csv"))
    outputs = [" ".join((done.stdout + done.stderr).split()) for done in (status, trained, added)]

    assert (trained.returncode, added.returncode) == (1, 1), outputs
    assert "has no models yet; the live log has 0 positive events of 0 users on its items" in outputs[0]
    assert "a first training needs 4 more of one user" in outputs[0]
    assert "4 of one user are needed: two to learn from" in outputs[1]
    assert "has no models that could rank new items, which the popular tier already shows; train once" in outputs[2]


def test_events_count_at_once_and_towards_the_first_training(shop: Stack) -> None:
    """Seen items are not shown again, used items become popular, and status counts the logged events."""
    answer = shop.sees_click(USER, "lamp-1")
    shop.sees_click(OTHER, "lamp-1")

    assert (answer["tier"], answer["reason"]) == ("popular", "not_trained")
    assert "lamp-1" not in rest_items(shop.known(USER, k=8, deadline_ms=2_000))
    assert wait_for(
        lambda: items_of(shop, "/v1/recommendations", user_id="third", k=1) == ["lamp-1"], 60.0, "a popular item"
    )
    assert wait_for(
        lambda: (
            "2 positive events of 2 users on its items: a first training needs 3 more" in shop.command("status").stdout
        ),
        60.0,
        "the log's events in the status",
    )
