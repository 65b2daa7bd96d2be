"""Keeps the tier and bundle of the newest answers, so that a click which names its request is counted for them.

Per process and bounded: a click that reaches another replica than its answer did, or comes long after it, is not attributed.
Replicas are chosen without regard to tiers, so the shares of tiers are comparable; their sum is too low by the number of replicas.
"""

from collections import OrderedDict
from typing import NamedTuple

from services.contracts.recommend import Recommendation


class AnswerSource(NamedTuple):
    """What made an answer."""

    tier: str
    bundle_version: str


class Attribution:
    """The sources of the newest `max_kept` answers, by request id."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._sources: OrderedDict[str, AnswerSource] = OrderedDict()

    def answered(self, answer: Recommendation) -> None:
        """Keep the answer's source; a repeated request id stands for its newest answer."""
        self._sources[answer.request_id] = AnswerSource(answer.tier.value, answer.bundle_version)
        self._sources.move_to_end(answer.request_id)
        if len(self._sources) > self._max_kept:
            self._sources.popitem(last=False)

    def source_of(self, request_id: str) -> AnswerSource | None:
        """Return the source of the answer to this request, if it is still kept."""
        return self._sources.get(request_id)
