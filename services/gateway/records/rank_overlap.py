"""Similarity of two ranked lists: rank-biased overlap. Pure.

Webber, Moffat and Zobel, "A Similarity Measure for Indefinite Rankings", ACM TOIS 28(4), 2010: the mean fraction of
common items among the first d of both lists, over the depths d of a reader who continues to the next position with
probability p. Beyond the ends of the lists the fraction is extrapolated (their RBO_EXT, equation 32). For two lists of
ten, p = 0.9 gives the first position a weight of 0.23 and the tenth 0.04 plus the extrapolation.
"""

from collections.abc import Sequence

PERSISTENCE = 0.9


def rank_biased_overlap(ranking: Sequence[str], other: Sequence[str], p: float = PERSISTENCE) -> float | None:
    """Return the overlap, 0 (no common item) to 1 (equal), of two lists without duplicates; None if either is empty."""
    short, long = sorted((ranking, other), key=len)
    if not short:
        return None
    in_short: set[str] = set()
    in_long: set[str] = set()
    num_common, weighted, share, common_at_end = 0, 0.0, 0.0, 0
    for index, item in enumerate(long):
        depth = index + 1
        in_long.add(item)
        num_common += item in in_short
        if depth <= len(short):
            in_short.add(short[index])
            num_common += short[index] in in_long
            common_at_end = num_common
        beyond = (
            common_at_end * max(0, depth - len(short)) / len(short)
        )  # extrapolates the overlap beyond the shorter list's end
        share = (num_common + beyond) / depth
        weighted += share * p**depth
    return (1 - p) / p * weighted + share * p ** len(long)
