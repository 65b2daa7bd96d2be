"""Page tokens: their contents, their owner, and their lifetime."""

import asyncio
import base64
import threading
from dataclasses import replace
from pathlib import Path
from string import ascii_letters, digits

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.access import Priority
from services.contracts.items import ItemState
from services.contracts.recommend import MAX_NEXT_CHARS, AvoidShown, Reason, RecommendRequest, ScoredItem, Tier
from services.errors import DeadlineExceeded, DependencyUnavailable, InvalidRequest
from services.features.page_key import FilePageKey
from services.gateway.request.pages import KEEP_S, ItemMarks, Pages, decode_marks, encode_marks, mark_of
from tests.unit.gateway.world import NOW_S, started_world

REQUEST = RecommendRequest(request_id="r", user_id="u", recent_item_ids=("a",))


class Unlive:
    """A live bundle that never loads another bundle."""

    def before_swap(self, prepare: object) -> None:
        """Ignore the callback, since no bundle is loaded."""


def pages(key: bytes = b"a key", now_s: float = NOW_S) -> Pages:
    """Return a reader and writer of page tokens with this key, at this time."""
    made = Pages(Unlive(), FilePageKey(key), lambda: now_s)  # type: ignore[arg-type]
    asyncio.run(made.refresh())
    return made


def scored(*item_ids: str) -> list[ScoredItem]:
    return [ScoredItem(item_id=item_id, score=0.0, title="", source=Tier.LLM) for item_id in item_ids]


def token_of(*item_ids: str, request: RecommendRequest = REQUEST) -> str:
    """Return the token after these items."""
    token = pages().next_token(request, scored(*item_ids))
    assert token is not None
    return token


def refusal(token: str, user_id: str | None = "u", key: bytes = b"a key", now_s: float = NOW_S) -> InvalidRequest:
    """Return the error for a token."""
    with pytest.raises(InvalidRequest) as caught:
        pages(key, now_s).next_token(msgspec.structs.replace(REQUEST, next=token, user_id=user_id), scored("z"))
    assert caught.value.field == "next"
    return caught.value


@given(st.sets(st.integers(0, 2**24 - 1), max_size=400))
def test_marks_are_read_as_they_were_written(marks: set[int]) -> None:
    """Any set of marks survives encoding."""
    assert decode_marks(encode_marks(sorted(marks)), len(marks)) == sorted(marks)


@given(st.data())
def test_no_changed_token_is_accepted(data: st.DataObject) -> None:
    """A token that differs in a bit, a character or its length is rejected by its field."""
    token = token_of("a", "b", "c")
    raw = base64.urlsafe_b64decode(token + "==")
    index = data.draw(st.integers(0, len(token) - 1))
    changed = data.draw(
        st.one_of(
            st.integers(0, 8 * len(raw) - 1).map(lambda bit: flipped(raw, bit)),
            st.characters(codec="ascii").map(lambda character: token[:index] + character + token[index + 1 :]),
            st.sampled_from(ascii_letters + digits).map(
                lambda character: token[:-1] + character
            ),  # some decode to the same bytes
            st.just(token[:index]),
            st.text(min_size=1, max_size=5).map(lambda more: token + more),
        )
    )
    if changed not in {token, ""}:
        assert refusal(changed).field == "next"


def flipped(raw: bytes, bit: int) -> str:
    """Return the token of these bytes with one bit flipped."""
    changed = (int.from_bytes(raw) ^ 1 << bit).to_bytes(len(raw))
    return base64.urlsafe_b64encode(changed).rstrip(b"=").decode()


def test_a_token_is_its_users_its_servers_and_an_hours() -> None:
    """A token of another user, a visitor or another key, and an expired token are rejected with the reason."""
    token = token_of("a")

    assert "not made for this user" in refusal(token, user_id="other").problem
    assert "not made for this user" in refusal(token, user_id=None).problem
    assert "not made for this user" in refusal(token, key=b"another key").problem
    assert refusal(token, now_s=NOW_S + KEEP_S + 1).problem == "expired"


def test_no_users_token_is_another_users_cut_short() -> None:
    """A token cut so that its last marks read as the start of another user id is rejected for that user."""
    for number in range(100_000):
        raw = base64.urlsafe_b64decode(token_of(f"item {number}", "b", "c") + "==")
        content, mac = raw[:-16], raw[-16:]
        if content[-2:-1] == b"+" and chr(content[-1]).isalnum() and content[-1] < 128:
            break
    user_id = f"{chr(content[-1])}+u"
    cut = base64.urlsafe_b64encode(content[:-2] + mac).rstrip(b"=").decode()

    assert "not made for this user" in refusal(cut, user_id=user_id).problem


def test_three_hundred_items_fit_and_more_end_the_list() -> None:
    """A token never exceeds MAX_NEXT_CHARS; a longer list ends without a token."""
    token = token_of(*(f"item {number}" for number in range(300)))

    assert len(token) <= MAX_NEXT_CHARS
    assert pages().next_token(REQUEST, scored(*(f"item {number}" for number in range(1_000)))) is None
    assert pages().next_token(REQUEST, []) is None


def test_without_a_key_there_is_no_token_and_none_can_be_read() -> None:
    """Without a key, no token is created, and reading a token raises DependencyUnavailable."""
    keyless = Pages(Unlive(), FilePageKey(b""), lambda: NOW_S)  # type: ignore[arg-type]

    assert keyless.next_token(REQUEST, scored("a")) is None
    with pytest.raises(DependencyUnavailable):
        asyncio.run(keyless.shown_before(msgspec.structs.replace(REQUEST, next=token_of("a")), None, 1.0))  # type: ignore[arg-type]


async def test_marks_find_their_items(tmp_path: Path) -> None:
    """Marks resolve to the catalogue's items; unknown marks resolve to nothing."""
    async with started_world(tmp_path) as world:
        live = world.plane.names.first.current()
        wanted = sorted(mark_of(item_id) for item_id in ("i03", "i17", "unknown"))

        assert set(ItemMarks(live).items(wanted, live)) == {"i03", "i17"}


async def test_marks_find_items_that_have_come(tmp_path: Path) -> None:
    """Marks of new items resolve before and after the index catches up."""
    async with started_world(tmp_path) as world:
        live = world.plane.names.first.current()
        known, names = ItemMarks(live), [f"new {number}" for number in range(9)]
        for sorted_at in (2, 5, 8):
            world.items.live_items.apply((name, ItemState(item_id=name)) for name in names[: sorted_at + 1])
            wanted = sorted(mark_of(name) for name in ["i03", *names[::2]])
            items = known.items(wanted, live)
            known.catch_up(live)

            assert set(items) == set(known.items(wanted, live)) == {"i03", *names[: sorted_at + 1 : 2]}
            assert known.num_behind(live) == 0


async def test_many_new_items_are_marked_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index catches up in a thread; a request whose deadline ends earlier is late, and the next finds the items."""
    threads: set[str] = set()

    def marked(item_id: str) -> int:
        threads.add(threading.current_thread().name)
        return mark_of(item_id)

    async with started_world(tmp_path) as world:
        page = await world.recommend("long", k=4)
        monkeypatch.setattr("services.gateway.request.pages.mark_of", marked)
        monkeypatch.setattr("services.gateway.request.pages._FEW_BEHIND", 3)
        world.items.live_items.apply((f"new {number}", ItemState(item_id=f"new {number}")) for number in range(9))
        following = await world.recommend("long", k=4, next=page.next, deadline_ms=5_000)
        live, pages = world.plane.names.first.current(), world.plane.recommend._pages
        world.items.live_items.apply((f"newer {number}", ItemState(item_id=f"newer {number}")) for number in range(9))
        with pytest.raises(DeadlineExceeded):
            await pages.shown_before(msgspec.structs.replace(REQUEST, user_id="long", next=page.next), live, 0.0)

    assert len(following.items) == 4
    assert "MainThread" in threads  # the marks of the four impressions
    assert any(name.startswith("pages") for name in threads)


@pytest.mark.parametrize("user_id", ["long", "listed", "short", "nobody", "sated"])
async def test_pages_of_every_tier_hold_each_item_once_until_none_are_left(tmp_path: Path, user_id: str) -> None:
    """In every tier the pages together contain each item that may be shown once, and then the list ends."""
    async with started_world(tmp_path) as world:
        whole = await world.recommend(user_id, k=20)
        seen: list[str] = []
        token = None
        for _ in range(10):
            page = await world.recommend(user_id, k=4, next=token)
            seen += [item.item_id for item in page.items]
            token = page.next
            if token is None:
                break

    assert len(set(seen)) == len(seen)
    assert set(seen) == {item.item_id for item in whole.items}


async def test_a_shed_page_holds_nothing_of_the_page_before(tmp_path: Path) -> None:
    """An answer from memory excludes the items of the token."""
    async with started_world(tmp_path) as world:
        world.strain(1)
        first = await world.recommend("long", Priority.LOW, k=4)
        second = await world.recommend("long", Priority.LOW, k=4, next=first.next)

    assert (first.reason, second.reason) == (Reason.SHED, Reason.SHED)
    assert {item.item_id for item in first.items}.isdisjoint(item.item_id for item in second.items)


async def test_what_was_shown_lately_is_avoided(tmp_path: Path) -> None:
    """Items shown within the last hour are excluded, older impressions are not."""
    async with started_world(tmp_path) as world:
        now_s = int(NOW_S)
        world.features.users["long"] = replace(
            world.features.users["long"], shown_times_s={"i05": now_s - 60, "i06": now_s - 7_200}
        )
        answer = await world.recommend("long", k=16, avoid_shown=AvoidShown("1h"))

    shown = {item.item_id for item in answer.items}
    assert "i05" not in shown
    assert "i06" in shown
