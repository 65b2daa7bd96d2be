"""How alike two ranked lists are: rank-biased overlap. Pure.

Webber, Moffat and Zobel, "A Similarity Measure for Indefinite Rankings", ACM TOIS 28(4), 2010: the mean share of common items among the first d of both,
over depths d that a reader reaches who goes on from each place to the next with probability p. Beyond the ends of the lists the share is taken to stay as it is
there (their RBO_EXT, equation 32). Of two lists of ten, p = 0.9 gives the first place a weight of 0.23 and the tenth 0.04 + what is beyond.
"""

from collections.abc import Sequence

PERSISTENCE = 0.9


def rank_biased_overlap(one: Sequence[str], other: Sequence[str], p: float = PERSISTENCE) -> float | None:
    """Return the overlap, 0 (no common item) to 1 (equal), of two lists without repeats; None where one is empty."""
    short, long = sorted((one, other), key=len)
    if not short:
        return None
    in_short: set[str] = set()
    in_long: set[str] = set()
    num_common, weighted, share, common_at_end = 0, 0.0, 0.0, 0
    for place, item in enumerate(long):
        depth = place + 1
        in_long.add(item)
        num_common += item in in_short
        if depth <= len(short):
            in_short.add(short[place])
            num_common += short[place] in in_long
            common_at_end = num_common
        beyond = (
            common_at_end * max(0, depth - len(short)) / len(short)
        )  # what the short one would have in common if it went on
        share = (num_common + beyond) / depth
        weighted += share * p**depth
    return (1 - p) / p * weighted + share * p ** len(long)
