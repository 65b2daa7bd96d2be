"""Logs of lists with known policies and rewards, so that another policy's true value is a sum over all lists."""

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np

from pipelines.experiments.off_policy import Estimate, LoggedLists, OffPolicy, estimate

_NUM_ITEMS, _NUM_PLACES = 6, 3
_LISTS = np.array(list(permutations(range(_NUM_ITEMS), _NUM_PLACES)))
_NUM_TASTES = 8
_WEIGHT_OF_PLACE = np.array([1.0, 0.6, 0.4])
NUM_USERS, NUM_EACH = 1_500, 4
Policy = np.ndarray
"""A policy: the probability of each list, by taste."""


def plackett_luce(scores: np.ndarray) -> Policy:
    """Return the probability of each list if items are drawn in turn by the softmax of scores (by taste and item)."""
    odds = np.exp(scores)[:, _LISTS]
    left = np.exp(scores).sum(axis=1, keepdims=True) - np.cumsum(odds, axis=2)[..., :-1].transpose(2, 0, 1)
    first = np.exp(scores).sum(axis=1)[:, None]
    return np.asarray(odds[..., 0] / first * odds[..., 1] / left[0] * odds[..., 2] / left[1])


def best_list(scores: np.ndarray) -> Policy:
    """Return the policy that always shows the list by these scores."""
    best = np.argsort(-scores, axis=1)[:, :_NUM_PLACES]
    return np.asarray((best[:, None, :] == _LISTS[None]).all(axis=2), dtype=float)


class World:
    """Users of a few tastes, with the click probabilities of each list's items."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.scores = self.draw.normal(0, 1, (_NUM_TASTES, _NUM_ITEMS))
        appeal = 0.3 / (1 + np.exp(-self.scores - self.draw.normal(0, 0.5, self.scores.shape)))
        self.chances = appeal[:, _LISTS] * _WEIGHT_OF_PLACE
        """By taste, list and position."""

    def truth(self, policy: Policy) -> float:
        """Return the policy's mean clicks per list over all tastes, which are equally frequent."""
        return float((policy * self.chances.sum(axis=2)).sum() / _NUM_TASTES)

    def log(self, logging: Policy, target: Policy, *, by_user: tuple[Policy, Policy] | None = None) -> LoggedLists:
        """Return lists drawn by the logging policy.

        With `by_user`, each user has one of two policies, by a hash: `logging` is their mean.
        """
        user = np.repeat(np.arange(NUM_USERS), NUM_EACH)
        taste = self.draw.integers(0, _NUM_TASTES, NUM_USERS)[user]
        if by_user is None:
            chosen = logging[taste]
        else:
            is_second = (self.draw.random(NUM_USERS) < 0.5)[user]
            chosen = np.where(is_second[:, None], by_user[1][taste], by_user[0][taste])
        shown = (np.cumsum(chosen, axis=1) < self.draw.random(len(user))[:, None] * (1 - 1e-12)).sum(axis=1)
        faithful = np.clip(self.draw.normal(1, 0.1, NUM_USERS), 0.5, 1.5)[user]  # one user's lists are not independent
        clicks = (self.draw.random((len(user), _NUM_PLACES)) < faithful[:, None] * self.chances[taste, shown]).sum(
            axis=1
        )
        predicted = 0.7 * self.chances.sum(axis=2)  # a model that is wrong by a third
        return LoggedLists(
            user=user,
            reward=clicks.astype(float),
            propensity=logging[taste, shown],
            probability=target[taste, shown],
            reward_of_shown=predicted[taste, shown],
            reward_of_policy=(target * predicted).sum(axis=1)[taste],
        )


def run(kind: str, seed: int) -> tuple[OffPolicy, float, float]:
    """Return the estimate for one kind of log, the policy's true value, and the part of it that the log can show."""
    world = World(seed)
    other = world.scores + world.draw.normal(0, 0.7, world.scores.shape)
    soft, target = plackett_luce(world.scores), plackett_luce(other)
    halves = None
    match kind:
        case "drawn by Plackett-Luce":
            logging = soft
        case "hashed variants":
            halves = best_list(world.scores), best_list(other)
            logging, target = (halves[0] + halves[1]) / 2, halves[1]
        case "an item is never shown first":
            logging = soft * (_LISTS[:, 0] != 0)
            logging /= logging.sum(axis=1, keepdims=True)
        case _:
            logging = best_list(world.scores)
    supported = float((target * (logging > 0)).sum() / _NUM_TASTES)
    return estimate(world.log(logging, target, by_user=halves)), world.truth(target), supported


def coverage(kind: str, num: int) -> dict[str, Any]:
    """Return a row: how many of `num` logs were refused, and how many intervals of the rest contain the true value."""
    runs = [run(kind, seed) for seed in range(num)]
    answered = [(estimate, truth) for estimate, truth, _ in runs if not estimate.refusal]
    row: dict[str, Any] = {"log": kind, "num": num, "refused": num - len(answered)}
    row["supported_share"] = round(sum(share for *_, share in runs) / num, 3)
    for name in ("ips", "snips", "doubly_robust"):
        intervals = [(getattr(estimate, name), truth) for estimate, truth in answered]
        row[name] = _cover(intervals) if intervals else None
    return row


def _cover(intervals: list[tuple[Estimate, float]]) -> Mapping[str, float]:
    covered = sum(interval.low <= truth <= interval.high for interval, truth in intervals)
    widths = [(interval.high - interval.low) / 2 / truth for interval, truth in intervals]
    return {
        "covered_share": round(covered / len(intervals), 3),
        "mean_half_width_share": round(float(np.mean(widths)), 3),
    }
