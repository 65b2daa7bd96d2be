"""Recent readings of one reader by the texts of their wishes, so that equal wishes are read once.

Wishes are user data: a key is a keyed hash of the texts, the key exists in this process only, and a reading holds the
catalogue's own words. An entry is dropped after ten minutes. Thread-safe.
"""

import secrets
import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from models.wishes.reading import Reading

KEEP_S = 600.0
MAX_BYTES = 32 * 1_048_576
_ENTRY_BYTES = 2_000
_SECRET = secrets.token_bytes(32)


class KeptReadings:
    """Readings in at most MAX_BYTES, the most recently used ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[Reading, float]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Reading | None:
        """Return the reading under a key, unless it is too old."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            if kept[1] < time.monotonic() - KEEP_S:
                self._drop(key)
                return None
            self._kept.move_to_end(key)
            return kept[0]

    def put(self, key: bytes, reading: Reading) -> None:
        with self._lock:
            self._drop(key)
            self._kept[key] = (reading, time.monotonic())
            self._num_bytes += _size(reading)
            while self._num_bytes > MAX_BYTES and self._kept:
                self._drop(next(iter(self._kept)))

    def _drop(self, key: bytes) -> None:
        if (dropped := self._kept.pop(key, None)) is not None:
            self._num_bytes -= _size(dropped[0])


def key_of(wishes: Sequence[str]) -> bytes:
    """Return the key of a conversation's wishes; forms of the same characters and widths of spaces are equal."""
    hashed = blake2b(key=_SECRET, digest_size=16)
    for wish in wishes:
        text = " ".join(unicodedata.normalize("NFC", wish).split()).encode(errors="surrogatepass")
        hashed.update(len(text).to_bytes(4) + text)
    return hashed.digest()


def _size(reading: Reading) -> int:
    arrays = (reading.scores, reading.excluded)
    return _ENTRY_BYTES + sum(array.nbytes for array in arrays if array is not None)
