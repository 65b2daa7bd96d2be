"""How many requests find their model in memory, where a replica has room for some of many names. Pure."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_ROUNDS = 100


def zipf_shares(num_names: int, zipf: float) -> "np.ndarray":
    """Return the fraction of the requests that ask for each name (num_names,): the n-th has a weight of n**-zipf."""
    import numpy as np

    weights = np.arange(1, num_names + 1, dtype=np.float64) ** -zipf
    shares: np.ndarray = weights / weights.sum()
    return shares


def resident_share(num_names: int, num_resident: int, zipf: float) -> float:
    """Return the fraction of requests whose name is in memory, if the least recently used name is unloaded.

    Names are asked for by Zipf's law. By Che's approximation (Che, Tung and Wang,
    2002), a name is in memory if it was asked for within a time that is equal for all names; that time is found by
    bisection on the number of names in memory. Loads take no time, so a busy loader makes the real fraction lower.
    """
    import numpy as np  # its start-up time is not worth paying for other commands

    if num_resident >= num_names:
        return 1.0
    weights = zipf_shares(num_names, zipf)
    low, high = 0.0, 1.0
    while (1 - np.exp(-weights * high)).sum() < num_resident:
        high *= 2
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        is_short = (1 - np.exp(-weights * middle)).sum() < num_resident
        low, high = (middle, high) if is_short else (low, middle)
    return float((weights * (1 - np.exp(-weights * high))).sum())
