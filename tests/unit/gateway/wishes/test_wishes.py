"""A wish changes the list of every tier, removes excluded items, and never costs the answer."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from models.registry.bundle import Bundle
from models.wishes.reading import Exclusion, Reading, ReadTerms
from services.contracts.access import Priority
from services.contracts.items import ItemState
from services.contracts.recommend import MAX_WISH_CHARS, Filters, Recommendation, SearchFor, SimilarTo
from tests.support.wait import until_answer
from tests.unit.gateway.clients import Door
from tests.unit.gateway.world import NUM_ITEMS, World, started_world

ODD = Exclusion("categories", ("odd",))


def wanting(*indices: int, score: float = 20.0, excluded: tuple[Exclusion, ...] = (), **understood: Any) -> Reading:
    """Return a reading that wants these items."""
    scores = np.zeros(NUM_ITEMS, dtype=np.float32)
    scores[list(indices)] = score
    mask = np.arange(NUM_ITEMS) % 2 == 1 if excluded else None
    return Reading(ReadTerms(reader="fake", **understood), scores, mask, excluded)


def ids(answer: Recommendation) -> list[str]:
    return [item.item_id for item in answer.items]


def _places(answer: Recommendation) -> dict[str, int]:
    return {item_id: position for position, item_id in enumerate(ids(answer), 1)}


@pytest.mark.parametrize(
    ("user_id", "tier", "fields"),
    [
        ("listed", "precomputed", {}),
        ("long", "llm", {}),
        ("short", "student", {}),
        ("nobody", "popular", {}),
        (None, "similar", {"subject": SimilarTo(("i00",))}),
    ],
)
async def test_a_wish_moves_items_of_every_tier(
    world: World, user_id: str | None, tier: str, fields: dict[str, Any]
) -> None:
    """The wished item comes first although the tier ranks it low or not at all; without the wish it does not."""
    world.reader.reading = wanting(18, must=("Item 18",))

    before = await world.recommend(user_id, **fields)
    after = await world.recommend(user_id, wish="the eighteenth", **fields)

    assert (before.tier, after.tier, after.reason) == (tier, tier, before.reason)
    assert ids(before)[0] != "i18"
    assert ids(after)[0] == "i18"
    assert before.understood is None
    assert after.understood is not None
    assert after.understood.must == ("Item 18",)


@pytest.mark.parametrize("user_id", ["listed", "long", "short", "nobody"])
async def test_an_excluded_item_is_in_no_list(world: World, user_id: str) -> None:
    """Exclusions hold in every tier and for every fill, and reach the LLM as filters."""
    world.reader.reading = Reading(
        ReadTerms(must_not=("odd",), reader="fake"), None, np.arange(NUM_ITEMS) % 2 == 1, (ODD,)
    )

    answer = await world.recommend(user_id, k=10, wish="nothing odd")

    assert answer.items
    assert all(int(item_id[1:]) % 2 == 0 for item_id in ids(answer))
    for request in world.llm.requests:
        assert request.filters.expression is not None or request.filters.allowed_item_ids is not None


async def test_exclusions_that_leave_no_item_are_relaxed_and_the_answer_says_so(world: World) -> None:
    """Seen items without an excluded term come back before the exclusions are dropped."""
    world.reader.reading = Reading(
        ReadTerms(must_not=("odd",), reader="fake"), None, np.arange(NUM_ITEMS) % 2 == 1, (ODD,)
    )
    seen = await world.recommend("short", filters=Filters(allowed_item_ids=("i00", "i01")), wish="nothing odd")
    relaxed = await world.recommend("short", filters=Filters(allowed_item_ids=("i01", "i03")), wish="nothing odd")

    assert ids(seen) == ["i00"]
    assert seen.understood is not None
    assert seen.understood.relaxed == ()
    assert sorted(ids(relaxed)) == ["i01", "i03"]
    assert relaxed.understood is not None
    assert relaxed.understood.relaxed == ("must_not",)


@pytest.mark.parametrize("user_id", ["listed", "long", "short", "nobody"])
async def test_a_wish_that_is_not_read_costs_the_answer_nothing(world: World, user_id: str) -> None:
    """After a failure the list is as without the wish, and says so."""
    world.reader.error = RuntimeError("of the test")

    before = await world.recommend(user_id)
    after = await world.recommend(user_id, wish="anything")

    assert (after.tier, after.reason, ids(after)) == (before.tier, "wish_not_read", ids(before))
    assert after.understood is None
    assert world.metric("tailrace_wishes_total", outcome="failed") == 1


async def test_a_bundle_without_a_reader_says_so(tmp_path: Path) -> None:
    """A wish needs a reader; requests without wishes do not."""
    async with started_world(tmp_path, load_reader=lambda _bundle, _catalogue: None) as world:
        assert (await world.recommend("short", wish="anything")).reason == "wish_not_read"
        assert (await world.recommend("short")).reason != "wish_not_read"
        assert world.metric("tailrace_wishes_total", outcome="missing") == 1


async def test_a_slow_reader_opens_a_breaker_and_every_answer_is_in_time(world: World) -> None:
    """A reader that hangs is not waited for beyond half of the deadline, and after some failures not at all."""
    world.reader.gate.clear()
    outcomes = []
    for number in range(6):
        started_s = time.monotonic()
        answer = await world.recommend("short", wish=f"wish {number}", deadline_ms=2_000)
        outcomes.append((answer.reason, time.monotonic() - started_s < 2.0))
    world.reader.gate.set()

    assert set(outcomes) == {("wish_not_read", True)}
    assert world.metric("tailrace_wishes_total", outcome="open") > 0
    assert len(world.reader.wishes) < 6


async def test_a_reader_whose_thread_is_gone_costs_no_answer(world: World) -> None:
    """Readings that cannot even be submitted count as failures: answered in time, and by the breaker after some."""
    assert (await world.recommend("short", wish="the first")).reason != "wish_not_read"
    world.plane.wishes._readers._thread.shutdown()

    answers = [await world.recommend("short", wish=f"wish {number}", deadline_ms=200) for number in range(6)]

    assert {(answer.tier, answer.reason) for answer in answers} == {("student", "wish_not_read")}
    assert world.metric("tailrace_wishes_total", outcome="failed") > 0
    assert world.metric("tailrace_wishes_total", outcome="open") > 0


async def test_equal_wishes_are_read_once(world: World) -> None:
    """Spaces do not matter; another conversation is another wish."""
    for wish, before in (("a  comedy", ()), ("a comedy ", ()), ("a comedy", ("old",))):
        await world.recommend("short", wish=wish.strip(), session_wishes=before)

    assert world.reader.wishes == [("a  comedy",), ("old", "a comedy")]
    assert world.metric("tailrace_wishes_total", outcome="kept") == 1


async def test_words_of_new_items_are_read_soon(tmp_path: Path) -> None:
    """An item that arrives after the bundle is found by its words, in wishes and in searches, within a second or so."""
    async with started_world(tmp_path, about={"wishes": {"weight": 3}}, load_reader=Bundle.wish_reader) as world:
        state = ItemState(item_id="new", title="Zanzibar Nights", categories=("Safari",))
        world.items.live_items.apply([("new", state)])

        async def first(**fields: Any) -> str:
            return ids(await world.recommend("short", **fields))[0]

        await until_answer(lambda: first(wish="a safari"), lambda item_id: item_id == "new")
        await until_answer(lambda: first(subject=SearchFor("zanzbar nights")), lambda item_id: item_id == "new")


async def test_changed_words_of_known_items_are_read_soon(tmp_path: Path) -> None:
    """A title or category that the shop changes replaces the bundle's, until it is taken back."""
    async with started_world(tmp_path, about={"wishes": {"weight": 3}}, load_reader=Bundle.wish_reader) as world:
        live = world.items.live_items
        live.apply([("i09", ItemState(item_id="i09", title="Zanzibar Nights", categories=("Safari",)))])

        async def first(**fields: Any) -> str:
            return ids(await world.recommend("short", **fields))[0]

        await until_answer(lambda: first(wish="a safari"), lambda item_id: item_id == "i09")
        await until_answer(lambda: first(subject=SearchFor("zanzbar nights")), lambda item_id: item_id == "i09")
        live.apply([("i09", None)])
        live.apply([("i09", ItemState(item_id="i09"))])
        await until_answer(lambda: first(subject=SearchFor("zanzbar nights")), lambda item_id: item_id != "i09")


async def test_joiners_within_words_are_printable(door: Door, world: World) -> None:
    """Words of Persian and Indic scripts and emoji have joiners, and Arabic texts marks of direction."""
    for text in (
        "\u0641\u06cc\u0644\u0645\u200c\u0647\u0627\u06cc",
        "\u0915\u094d\u200d\u0937",
        "family \U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\u0643\u0648\u0645\u064a\u062f\u064a\u0627\u200f",
    ):
        assert (await door.search(text, k=1)).code == "ok"
        await world.recommend("short", wish=text)


async def test_a_search_finds_titles_by_beginnings_and_despite_typing_errors(door: Door, world: World) -> None:
    """A search needs no user; with one it orders equal matches for the user, and shows seen items."""
    for query, first in (("item 7", "i07"), ("itme 12", "i12"), ("ite 3", "i03")):
        reply = await door.search(query, k=2)
        assert reply.code == "ok"
        assert reply.body["items"][0]["item_id"] == first
        assert reply.body["reason"] == "search_asked"
    personal = await door.search("item 0", user_id="short", k=2)
    assert personal.body["items"][0]["item_id"] == "i00"
    assert personal.body["tier"] == "student"
    assert world.reader.wishes[0] == ("item 7",)


async def test_a_search_without_words_is_refused(door: Door) -> None:
    """The query is needed, at most 400 printable characters."""
    for query in (None, "", "a" * (MAX_WISH_CHARS + 1), "a\u202eb"):
        reply = await door.search(query)
        assert (reply.code, reply.field) == ("invalid_request", "q")


async def test_a_wish_comes_through_both_doors(door: Door, world: World) -> None:
    """The answer says what was understood, and the conversation reaches the reader in order."""
    world.reader.reading = wanting(18, must=("Comedy",), excluded=(ODD,), must_not=("odd",), liked=("Alien",))

    reply = await door.recommend({"user_id": "short", "k": 2, "wish": "newest", "session_wishes": ["oldest", "older"]})

    assert reply.body["understood"] == {
        "must": ["Comedy"],
        "must_not": ["odd"],
        "liked": ["Alien"],
        "reader": "fake",
        "relaxed": [],
    }
    assert world.reader.wishes == [("oldest", "older", "newest")]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"wish": ""}, "wish"),
        ({"wish": "a" * (MAX_WISH_CHARS + 1)}, "wish"),
        ({"wish": "a\nb"}, "wish"),
        ({"wish": "\u202ereversed"}, "wish"),
        ({"session_wishes": ["fine", "a\tb"]}, "session_wishes[1]"),
        ({"session_wishes": ["a"] * 21}, "session_wishes"),
    ],
)
async def test_wishes_have_bounds(door: Door, fields: dict[str, Any], field: str) -> None:
    """Length, number and characters are bounded; the error names the field."""
    reply = await door.recommend({"user_id": "short", **fields})

    assert (reply.code, reply.field) == ("invalid_request", field)


async def test_no_wish_is_logged_counted_or_recorded(world: World) -> None:
    """The text is in no log line, metric, impression or explanation, whether it was read, refused or failed."""
    secret = "my private affliction"
    with capture_logs() as lines:
        await world.recommend("short", request_id="r", wish=secret)
        await world.recommend("short", wish=secret, priority=Priority.LOW)
        world.reader.error = RuntimeError(secret)
        await world.recommend("short", wish=f"{secret} again")
        await asyncio.sleep(0.01)
        await world.plane.explanations.flush()

    metrics = list(world.registry.collect())
    kept = [repr(source) for source in (lines, world.impressions.records, world.shelf.records, metrics)]
    assert world.impressions.records
    assert world.shelf.records
    assert all(secret not in text for text in kept)


async def test_an_explanation_shows_the_list_without_and_with_the_wish(world: World) -> None:
    """Each item has its position in both lists; the sentence names what was read."""
    world.reader.reading = wanting(18, must=("Comedy",))
    before = await world.recommend("short", k=3)
    after = await world.recommend("short", request_id="wished", k=3, wish="a comedy")
    await world.plane.explanations.flush()

    explanation = await world.plane.explanations.find("wished")

    places = {item.item_id: (item.before, item.after) for item in explanation.wished}
    assert {item: position for item, (position, _) in places.items() if position} == _places(before)
    assert {item: position for item, (_, position) in places.items() if position} == _places(after)
    assert explanation.understood is not None
    assert explanation.understood.must == ("Comedy",)


@pytest.mark.parametrize(
    "num_wishes", [300, pytest.param(100_000, marks=[pytest.mark.grid, pytest.mark.timeout(3_600)])]
)
async def test_fuzzed_wishes_are_all_answered(tmp_path: Path, num_wishes: int) -> None:
    """No text makes the reader or the request path fail."""
    draw = random.Random(7)
    letters = "aäßéжあ中🎬'\"-,.;:!?()[]{}<>/\\&%$#@*+=~`^|_ 0123456789nonotbutwithoutlike"
    words = ["even", "odd", "item", "no", "not", "without", "nothing", "like", "but", "old", "new", "before 1990", '"']
    words += [
        "if",
        "unless",
        "dislikes:",
        "=",
        "+",
        "-",
        "/",
        ".",
        "too",
        "scrap that",
        "ruins",
        "us",
        "boring",
        "I will",
    ]
    async with started_world(tmp_path, load_reader=Bundle.wish_reader) as world:
        for _ in range(num_wishes):
            if draw.random() < 0.5:
                wish = "".join(draw.choice(letters) for _ in range(draw.randint(1, MAX_WISH_CHARS)))
            else:
                wish = " ".join(draw.choice(words) for _ in range(draw.randint(1, 40)))[:MAX_WISH_CHARS]
            answer = await world.recommend(draw.choice(["short", "long", "nobody"]), wish=wish)
            assert answer.items
            assert answer.reason != "wish_not_read"
