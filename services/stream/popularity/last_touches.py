"""When users last touched items, in a table of fixed size: one entry of eight bytes per (user, item), the newest ones stay.

An entry's bucket follows from the pair's hash, and half of the hash stays in the entry: two pairs are taken for one about once in a
billion. Pure.
"""

from array import array
from hashlib import blake2b

_WAYS = 4
_TIME_BITS = 32
_TIME_MASK = (1 << _TIME_BITS) - 1


class LastTouches:
    """Remembers the last time of about `num_pairs` pairs, a power of two. What was touched longest ago is forgotten first, roughly."""

    def __init__(self, num_pairs: int) -> None:
        self._entries = array("Q", bytes(8 * num_pairs))
        self._mask = num_pairs - _WAYS

    def touch(self, user_id: str, item_id: str, time_s: int) -> int | None:
        """Record a touch at this time (Unix s), and return the latest one before this call; None if none is remembered."""
        pair = int.from_bytes(blake2b(f"{user_id}\0{item_id}".encode(), digest_size=8).digest())
        mark = pair >> _TIME_BITS
        first = pair & self._mask
        entries = self._entries
        oldest = first
        for slot in range(first, first + _WAYS):
            entry = entries[slot]
            if entry >> _TIME_BITS == mark and entry:
                before_s = entry & _TIME_MASK
                entries[slot] = mark << _TIME_BITS | max(before_s, time_s)
                return before_s
            if entry & _TIME_MASK < entries[oldest] & _TIME_MASK:
                oldest = slot
        entries[oldest] = mark << _TIME_BITS | time_s
        return None
