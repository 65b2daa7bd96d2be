"""Explanations of recent requests: buffered records, written to a shared store five times a second.

Off the request path: offering a record is an append, and the record is encoded when it is written, since most
explanations are never read. Records that exceed the buffer (200 a second, and as many slow requests) or that the store
does not accept are dropped and counted. Any replica can explain any request, since the store is shared. Does not know
Redis: the port is below.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import structlog
from prometheus_client import Counter

from models.mixer import DECODER, MODEL, STUDENT
from services.contracts.explanation import (
    OWN_FIELDS,
    ExplanationRecord,
    ListState,
    RuledItem,
    decode_explanation,
    encode_explanation,
)
from services.contracts.recommend import Recommendation, Tier, Understood
from services.contracts.tenant import DEFAULT_TENANT, scoped
from services.errors import DependencyUnavailable, NotFound
from services.gateway.periodic_task import PeriodicTask
from services.gateway.ranking import choose, moves
from services.gateway.records.answer import AnswerRecord, RefusalRecord, RoutingRecord
from services.gateway.request.context import RequestContext
from services.gateway.rules.stage import Ruled, moves_of
from services.gateway.tiers.llm import LlmResult
from services.gateway.tiers.precomputed import list_state
from services.gateway.tiers.tier import TierResult
from services.router.policy import Facts

log = structlog.get_logger()

_FLUSH_EVERY_S = 0.2
_WRITTEN_AFTER_S = 2 * _FLUSH_EVERY_S
_MAX_WAITING = 80
_FIND_TIMEOUT_S = 1.0
_WRITE_TIMEOUT_S = 1.0
_MAX_MIXED = 20
"""Maximum items with the parts of their score per explanation."""
_MIXED_BY = {Tier.STUDENT: STUDENT, Tier.LLM: DECODER}
_MAX_RULED = 100
"""Maximum items before and after the rules per explanation."""
_NOT_EXPLAINED = frozenset({"not_allowed"})
"""Refusals of callers who may not rank. As unknown callers, they must not overwrite other callers' explanations."""
# the reason states the requested subject
_FACT_NAMES = tuple(field.name for field in fields(Facts) if field.name != "asked")
_facts_of = attrgetter(*_FACT_NAMES)


class ExplanationStore(Protocol):
    """Keeps explanations for a limited time, for all replicas."""

    async def put(self, records: Sequence[tuple[str, bytes]], timeout_s: float) -> None:
        """Store records (request id, bytes), replacing earlier records of the same id. Raises DependencyUnavailable."""
        ...

    async def get(self, request_id: str, timeout_s: float) -> bytes | None:
        """Return the record under this id; None if it is unknown or expired. Raises DependencyUnavailable."""
        ...

    async def close(self) -> None: ...


class Explanations:
    """Keeps explanations in `store`; None disables explanations."""

    def __init__(self, store: ExplanationStore | None, outcomes: Counter) -> None:
        self._store = store
        self._waiting: list[AnswerRecord | RefusalRecord] = []
        self._has_waiting = asyncio.Event()
        self._kept, self._dropped = outcomes.labels("kept"), outcomes.labels("dropped")
        self._is_unavailable = False
        self._flushing = PeriodicTask("explanations", self.flush, _FLUSH_EVERY_S, when=self._has_waiting)

    def answered(self, record: AnswerRecord) -> None:
        """Buffer an answer's record, or drop it if the buffer is full.

        The second half of the buffer is for slow requests.
        """
        self._offer(record, _MAX_WAITING if record.is_slow else _MAX_WAITING // 2)

    def refused(self, record: RefusalRecord) -> None:
        """Buffer a refusal's record, or drop it if half of the buffer is full; its caller knows the reason."""
        if record.tenant is not None and record.code not in _NOT_EXPLAINED:
            self._offer(record, _MAX_WAITING // 2)

    def _offer(self, record: AnswerRecord | RefusalRecord, num_places: int) -> None:
        if self._store is None:
            return
        if len(self._waiting) < num_places:
            self._waiting.append(record)
            self._has_waiting.set()
        else:
            self._dropped.inc()

    async def find(self, request_id: str) -> ExplanationRecord:
        """Return the explanation of a recent request by its scoped id.

        Raises NotFound if it is unknown, expired, or in another version's format; DependencyUnavailable.
        """
        stored = await self._stored(request_id)
        if stored is None and self._store is not None:  # the answering gateway may not have written it yet
            await asyncio.sleep(_WRITTEN_AFTER_S)
            stored = await self._stored(request_id)
        if stored is None:
            raise NotFound("no explanation of this request is kept", "ask sooner, or raise TAILRACE_EXPLAIN_KEEP_S")
        try:
            return decode_explanation(stored, _FACT_NAMES)
        except (ValueError, TypeError) as error:  # during an upgrade gateways of two versions share the store
            raise NotFound(
                "the explanation of this request is another version's", "ask a gateway of that one"
            ) from error

    async def _stored(self, request_id: str) -> bytes | None:
        return None if self._store is None else await self._store.get(request_id, _FIND_TIMEOUT_S)

    async def start(self) -> None:
        if self._store is not None:
            self._flushing.start()

    async def stop(self) -> None:
        """Write the buffered records and close the store."""
        await self._flushing.stop()
        await self.flush()
        if self._store is not None:
            await self._store.close()

    async def flush(self) -> None:
        """Write the buffered records now, in one exchange; drop them if the store is unavailable."""
        if self._store is None or not self._waiting:
            return
        records, self._waiting = self._waiting, []
        try:
            await self._store.put([_encoded(record) for record in records], _WRITE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - a failure must not affect requests or later explanations
            self._lost(len(records), error)
        else:
            self._kept.inc(len(records))
            self._is_unavailable = False

    def _lost(self, num_lost: int, error: Exception) -> None:
        self._dropped.inc(num_lost)
        if not self._is_unavailable:
            level = log.warning if isinstance(error, DependencyUnavailable) else log.exception
            level("explanations_dropped", error=repr(error))
        self._is_unavailable = isinstance(error, DependencyUnavailable)


def _encoded(record: AnswerRecord | RefusalRecord) -> tuple[str, bytes]:
    """Return the scoped request id and the stored form."""
    if isinstance(record, RefusalRecord):
        key = scoped(record.tenant or DEFAULT_TENANT, record.request_id)
        own = (key, record.door, record.code, record.now_ms, record.message)
        return key, encode_explanation((*own, *[None] * (len(OWN_FIELDS) - len(own))), (), None, ())
    key = scoped(record.caller.tenant, record.answer.request_id)
    routing, own_fields = record.routing, _own_fields(record, key)
    if routing is None:
        return key, encode_explanation(own_fields, (), None, ())
    llm = routing.results.get(Tier.LLM)
    llm_fields = _llm_fields(llm) if isinstance(llm, LlmResult) else None
    stages, facts = routing.context.stages.raw(), _facts_of(routing.facts)
    ruled = () if routing.ruled is None else _moves(routing.ruled, routing.context)
    mixed = _mixed(routing.context, routing.results.get(record.answer.tier), record.answer.tier)
    wish = _wish(record.answer, routing)
    return key, encode_explanation(own_fields, facts, llm_fields, stages, ruled, mixed, wish)


def ruled_items(record: AnswerRecord) -> tuple[RuledItem, ...]:
    """Return the first items of an answer before and after the rules, as in its explanation; empty without rules."""
    routing = record.routing
    if routing is None or routing.ruled is None:
        return ()
    return tuple(
        RuledItem(item_id=item_id, before=before, after=after, rules=rules)
        for item_id, before, after, rules in _moves(routing.ruled, routing.context)
    )


def _moves(ruled: Ruled, context: RequestContext) -> list[tuple[str, int | None, int | None, tuple[str, ...]]]:
    """Return the first items before and after the rules, in the order of RuledItem's fields."""
    items = context.live.items
    return [(items.item_id(index), before, after, rules) for index, before, after, rules in moves_of(ruled)][
        :_MAX_RULED
    ]


def _mixed(context: RequestContext, result: TierResult | None, tier: Tier) -> list[tuple[str, float, dict[str, float]]]:
    """Return the first items of a tier that mixes sources, as MixedItem's fields; empty for other tiers."""
    mixer, model, ranking = context.live.mixer, _MIXED_BY.get(tier), None if result is None else result.ranking
    blend = None if mixer is None or model is None else mixer.blend(model, len(context.history))
    if mixer is None or model is None or blend is None or ranking is None:
        return []
    items = ranking.indices[:_MAX_MIXED].tolist()
    scores = np.exp(ranking.scores[:_MAX_MIXED]).tolist()
    parts = mixer.contributions(model, context.history, blend, items)
    return [
        (context.live.items.item_id(item), score, {MODEL: max(0.0, score - sum(own.values())), **own})
        for item, score, own in zip(items, scores, parts, strict=True)
    ]


def _wish(
    answer: Recommendation, routing: RoutingRecord
) -> tuple[list[Any], list[tuple[str, int | None, int | None]]] | None:
    """Return the understood wish and each item's position without and with it; None if no wish was read."""
    context, understood = routing.context, answer.understood
    if understood is None:
        return None
    rankings = [result.ranking for result in routing.results.values() if result.ranking is not None]
    rankings.sort(key=lambda ranking: list(Tier).index(ranking.tier))
    items, available = context.live.items, context.live.items.columns.available
    before = [index for index, _, _ in choose(rankings, context.masks.showable, context.request.num_items, available)]
    after = items.indices(item.item_id for item in answer.items)
    fields = [getattr(understood, name) for name in Understood.__struct_fields__]
    return fields, [(items.item_id(index), position, now) for index, position, now in moves(before, after)]


def _own_fields(record: AnswerRecord, key: str) -> tuple[object, ...]:
    """Return an answer's values, in the order of OWN_FIELDS."""
    answer = record.answer
    return (
        key,
        record.door,
        "ok",
        record.now_ms,
        None,
        record.trace_id,
        record.request.user_id,
        record.caller.key_id,
        record.caller.priority.name.lower(),
        answer.tier,
        answer.reason,
        record.planned.tier,
        record.planned.reason,
        answer.bundle_version,
        record.request.k,
        len(answer.items),
        answer.deadline_ms,
        round(record.elapsed_s * 1_000, 3),
        answer.feature_age_ms,
        ListState.NOT_READ if record.routing is None else list_state(record.routing.context),
        record.request.surface,
        record.variant,
    )


def _llm_fields(llm: LlmResult) -> tuple[object, ...]:
    """Return the LLM's values, in the order of LlmPart's fields."""
    reply = llm.reply
    if reply is None:
        return (llm.outcome, None, None, None, None, None, None)
    counts = (reply.num_prompt_tokens, reply.num_cached_tokens, reply.num_steps)
    return (llm.outcome, *counts, reply.queue_ms, reply.compute_ms, reply.decode_ms)
