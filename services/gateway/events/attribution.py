"""Remembers who made the newest answers, so that a click which names its request can be counted for its tier and bundle.

Per process and bounded: a click that reaches another replica than its answer did, or comes long after it, finds nobody.
Replicas are chosen without regard to tiers, so shares of tiers stay comparable; their sum is too low by the number of replicas.
"""

from collections import OrderedDict
from typing import NamedTuple

from services.contracts.recommend import Recommendation


class Maker(NamedTuple):
    """Who made an answer."""

    tier: str
    bundle_version: str


class Attribution:
    """The makers of the newest `max_kept` answers by request id."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._makers: OrderedDict[str, Maker] = OrderedDict()

    def answered(self, answer: Recommendation) -> None:
        """Remember who made this answer; a request id that comes again stands for its newest answer."""
        self._makers[answer.request_id] = Maker(answer.tier.value, answer.bundle_version)
        self._makers.move_to_end(answer.request_id)
        if len(self._makers) > self._max_kept:
            self._makers.popitem(last=False)

    def maker_of(self, request_id: str) -> Maker | None:
        """Tell who made the answer to this request, if that is still known here."""
        return self._makers.get(request_id)
