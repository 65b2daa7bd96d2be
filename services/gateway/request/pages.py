"""Page tokens: the `next` of an answer, which a later request sends to get items not shown yet. Stateless.

    token   base64url( format | expiry (Unix s) | number | marks of all items shown so far | HMAC, 16 bytes )
    HMAC    SHA-256 of the length of everything before it, of those bytes, and of the tenant's user

Format 1 joined marks and user without a length, so a token could be recut for another user: it is refused.

A mark is 24 bits of a hash of the item id, so a token outlives a bundle. Given 300 shown items, one in sixty thousand
other items shares a mark and is excluded too. Marks are sorted and their differences Rice-coded: about 330 fit into a
kilobyte. All gateways of a stack share the key.
"""

import base64
import hmac
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from services.contracts.recommend import MAX_NEXT_CHARS, RecommendRequest, ScoredItem
from services.errors import DependencyUnavailable, InvalidRequest
from services.gateway.overload.long_work import LongWork
from services.gateway.periodic_task import PeriodicTask
from services.gateway.request.live_bundle import ByTexts, Live
from services.gateway.request.names import Names

log = structlog.get_logger()

KEEP_S = 3_600
_FORMAT = 2
_LENGTH_BYTES = 4
_HEADER = struct.Struct(">BIH")
_MAC_BYTES = 16
_MARK_BITS, _MARK_BYTES = 24, 3
_MAX_BYTES = MAX_NEXT_CHARS * 3 // 4
_KEY_TIMEOUT_S, _KEY_EVERY_S = 1.0, 10.0
_FEW_BEHIND = 4_096
"""Up to this many new items are marked and searched on the request path."""
_FIX = "send the `next` of this user's last answer, or leave it out to begin again"


class PageKey(Protocol):
    """The key of the tokens, the same for all gateways."""

    async def get(self, own: bytes | None, timeout_s: float) -> bytes:
        """Return the key; a store without a key adopts `own`, or a new key. Raises DependencyUnavailable."""
        ...

    async def close(self) -> None: ...


class Pages:
    """Reads and creates tokens. One per process."""

    def __init__(self, names: Names, key: PageKey, wall_clock: Callable[[], float] = time.time) -> None:
        self._source = key
        self._wall_clock = wall_clock
        self._key: bytes | None = None
        self._marks: WeakKeyDictionary[Live, ItemMarks] = WeakKeyDictionary()
        self._known = ByTexts(lambda texts: _NONE_SORTED.with_ids(texts.item_ids))
        self._marking = LongWork("pages")
        self._refreshing = PeriodicTask("page_key", self.refresh, _KEY_EVERY_S)
        names.before_swap(self._marks_of)

    async def start(self) -> None:
        """Get the key and refresh it in the background: if the store loses it, another gateway may replace it."""
        await self.refresh()
        self._refreshing.start()

    async def stop(self) -> None:
        """Stop the refresh and close the key source."""
        await self._refreshing.stop()
        await self._source.close()

    async def refresh(self) -> None:
        """Get the key, keeping the last key while the store is unavailable, and mark new items."""
        with suppress(DependencyUnavailable):
            self._key = await self._source.get(self._key, _KEY_TIMEOUT_S)
        for live, known in [*self._marks.items()]:
            if known.num_behind(live) > _FEW_BEHIND:
                await self._marking.run(None, known.catch_up, live)

    async def shown_before(self, request: RecommendRequest, live: Live, timeout_s: float) -> tuple[str, ...]:
        """Return the items of the earlier pages that the live catalogue has.

        Raises InvalidRequest, DependencyUnavailable or DeadlineExceeded.
        """
        if request.next is None:
            return ()
        marks, known = self._read(request.next, _owner_of(request)), self._marks_of(live)
        if known.num_behind(live) > _FEW_BEHIND:
            await self._marking.run(timeout_s, known.catch_up, live)
        return known.items(marks, live)

    def next_token(self, request: RecommendRequest, items: Sequence[ScoredItem]) -> str | None:
        """Return the token for the page after these items.

        Returns None after the last page, or if too many items have been shown.
        """
        if not items or self._key is None:
            return None
        before = [] if request.next is None else self._read(request.next, _owner_of(request))
        marks = sorted({*before, *(mark_of(item.item_id) for item in items)})
        if len(marks) > _MAX_BYTES:  # each mark takes at least a byte
            return None
        header = _HEADER.pack(_FORMAT, int(self._wall_clock()) + KEEP_S, len(marks))
        content = header + encode_marks(marks)
        if len(content) + _MAC_BYTES > _MAX_BYTES:
            return None
        return base64.urlsafe_b64encode(content + self._mac(content, _owner_of(request))).rstrip(b"=").decode()

    def _read(self, token: str, owner: bytes) -> list[int]:
        """Return the marks of a token.

        Raises InvalidRequest for a forged or expired token or another user's, DependencyUnavailable without a key.
        """
        if self._key is None:
            raise DependencyUnavailable("features", _KEY_TIMEOUT_S)
        try:
            raw = base64.b64decode(token.encode() + b"=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except ValueError as error:
            raise InvalidRequest("next", "no token", _FIX) from error
        content, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        is_canonical = base64.urlsafe_b64encode(raw).rstrip(b"=") == token.encode()
        if not (is_canonical and len(content) > _HEADER.size and hmac.compare_digest(mac, self._mac(content, owner))):
            raise InvalidRequest("next", "not made for this user by this server", _FIX)
        version, expires_s, num_marks = _HEADER.unpack_from(content)
        if version != _FORMAT or expires_s < self._wall_clock():
            raise InvalidRequest("next", "expired", _FIX)
        return decode_marks(content[_HEADER.size :], num_marks)

    def _mac(self, content: bytes, owner: bytes) -> bytes:
        assert self._key is not None
        signed = len(content).to_bytes(_LENGTH_BYTES) + content + owner
        return hmac.digest(self._key, signed, sha256)[:_MAC_BYTES]

    def _marks_of(self, live: Live) -> "ItemMarks":
        """Return the marks of a bundle's items, normally computed in the loading thread."""
        marks = self._marks.get(live)
        if marks is None:
            marks = self._marks[live] = ItemMarks(live, self._known.of(live.catalogue.texts))
        return marks


def _owner_of(request: RecommendRequest) -> bytes:
    """Return the signed owner of a token: the user, scoped to the tenant, or the tenant's anonymous visitors."""
    return b"-" + request.tenant.encode() if request.user_id is None else b"+" + request.user_id.encode()


class ItemMarks:
    """The items of one bundle and the newer items of the live catalogue, by mark."""

    def __init__(self, live: Live, known: "_Sorted | None" = None) -> None:
        """Mark the items; takes 0.7 s for a million. `known` are the bundle's marked items, if any."""
        self._sorted = (known or _NONE_SORTED).with_items(live)
        self._newest: list[int] = []
        self._num_newest_from = self._sorted.num_items

    def num_behind(self, live: Live) -> int:
        """Return the number of items that are not sorted yet."""
        return live.items.num_named - self._sorted.num_items

    def catch_up(self, live: Live) -> None:
        """Sort the new items. Takes 0.5 s for 200,000: call in a thread."""
        self._sorted = self._sorted.with_items(live)

    def items(self, marks: Sequence[int], live: Live) -> tuple[str, ...]:
        """Return the items that have one of these sorted marks. Call in the event loop."""
        in_order, items, is_wanted = self._sorted, live.items, set(marks)
        del self._newest[: in_order.num_items - self._num_newest_from]
        self._num_newest_from = first = in_order.num_items
        first_unmarked = first + len(self._newest)
        self._newest += [mark_of(items.item_id(index)) for index in range(first_unmarked, items.num_named)]
        newest = [first + offset for offset, mark in enumerate(self._newest) if mark in is_wanted]
        return tuple(items.item_id(int(index)) for index in (*in_order.indices(marks), *newest))


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The first items by mark: sorted marks (n,) uint32, and item indices (n,) int32 in that order. Immutable."""

    marks: np.ndarray
    order: np.ndarray

    @property
    def num_items(self) -> int:
        return len(self.marks)

    def with_items(self, live: Live) -> "_Sorted":
        """Sort all current items, reusing these marks."""
        return self.with_ids([live.items.item_id(index) for index in range(self.num_items, live.items.num_named)])

    def with_ids(self, item_ids: Sequence[str]) -> "_Sorted":
        """Sort these items too, after the present items in this order."""
        if not item_ids:
            return self
        marks = np.empty(self.num_items + len(item_ids), dtype=np.uint32)
        marks[self.order] = self.marks
        marks[self.num_items :] = [mark_of(item_id) for item_id in item_ids]
        order = np.argsort(marks, kind="stable").astype(np.int32)
        return _Sorted(marks[order], order)

    def indices(self, marks: Sequence[int]) -> list[int]:
        """Return the indices of the items that have one of these marks."""
        wanted = np.array(marks, dtype=np.uint32)
        first, last = (np.searchsorted(self.marks, wanted, side=side) for side in ("left", "right"))
        return [self.order[position] for start, end in zip(first, last, strict=True) for position in range(start, end)]


_NONE_SORTED = _Sorted(np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.int32))


def mark_of(item_id: str) -> int:
    return int.from_bytes(blake2b(item_id.encode(errors="surrogatepass"), digest_size=_MARK_BYTES).digest())


def encode_marks(marks: Sequence[int]) -> bytes:
    """Encode distinct, sorted marks: differences to the previous mark, Rice-coded (Golomb with a power of two)."""
    num_low = _low_bits(len(marks))
    words, before = [], -1
    for mark in marks:
        gap, before = mark - before - 1, mark
        words.append("1" * (gap >> num_low) + "0" + format(gap & ((1 << num_low) - 1), f"0{num_low}b") * bool(num_low))
    bits = "".join(words)
    return int("1" + bits, 2).to_bytes(len(bits) // 8 + 1)


def decode_marks(data: bytes, num_marks: int) -> list[int]:
    """Decode this many marks. Raises InvalidRequest for truncated data."""
    bits = bin(int.from_bytes(data))[3:]  # without 0b and the leading 1
    num_low = _low_bits(num_marks)
    marks: list[int] = []
    start, before = 0, -1
    try:
        for _ in range(num_marks):
            end = bits.index("0", start)
            low = bits[end + 1 : end + 1 + num_low]
            before += 1 + ((end - start) << num_low) + (int(low, 2) if num_low else 0)
            start = end + 1 + num_low
            marks.append(before)
    except ValueError as error:
        raise InvalidRequest("next", "cut short", _FIX) from error
    return marks


def _low_bits(num_marks: int) -> int:
    """Return the number of bits of a difference that are stored verbatim: the length of an average difference."""
    return max(0, ((1 << _MARK_BITS) * 7 // 10 // max(1, num_marks)).bit_length() - 1)
