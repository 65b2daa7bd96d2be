"""Suggests the nearest known names for an unknown name."""

import difflib
from collections.abc import Collection, Iterable
from functools import partial
from heapq import nlargest
from itertools import pairwise

_NUM_OFFERED, _NUM_LIKELY, _NUM_MAYBE = 3, 6, 64
_MAX_COMPARED, _COMPARED_CHARS = 1_000, 64
"""difflib takes half a millisecond per pair, so it compares only the most likely names."""


def nearest(name: str, known: Collection[str] | Iterable[str]) -> str:
    """Return a fix that offers the nearest known names, or else the first known names, or says that none exist."""
    names = sorted(known)[:_MAX_COMPARED]
    if not names:
        return "omit it; no names are known"
    folded = {candidate.casefold()[:_COMPARED_CHARS]: candidate for candidate in names}
    wanted = name[:_COMPARED_CHARS].casefold()[:_COMPARED_CHARS]
    likely = nlargest(_NUM_LIKELY, nlargest(_NUM_MAYBE, folded, key=partial(_alike, wanted)), partial(_near, wanted))
    near = [folded[match] for match in difflib.get_close_matches(wanted, likely, n=_NUM_OFFERED)]
    offered = ", ".join(f"{candidate!r:.60}" for candidate in near or names[: 4 * _NUM_OFFERED])
    return f"the nearest: {offered}" if near else f"name one that there is, for example {offered}"


def _alike(wanted: str, name: str) -> float:
    """Return a similarity of two names by their characters and lengths."""
    return len(set(name).intersection(wanted)) - abs(len(name) - len(wanted)) / 8


def _near(wanted: str, name: str) -> float:
    """Return a similarity of two names by their pairs of characters."""
    pairs, others = (set(pairwise(text)) for text in (wanted, name))
    return len(pairs & others) / (1 + len(pairs) + len(others))
