"""Describes an explanation in sentences: the tier and its reason, the LLM's work, the stages, the deadline. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime

from services.contracts.explanation import ExplanationRecord, ListState, StageTime
from services.contracts.recommend import Reason, Tier
from services.gateway.reasons import REASONS

_LIST_SENTENCES: Mapping[str, str] = {
    ListState.NONE: "No list is stored for the user.",
    ListState.OLDER_THAN_EVENTS: "The stored list was not used: the user has newer events.",
    ListState.DOES_NOT_COVER: "The stored list was not used: it holds too few items that this request may show.",
}


_DAY_MS = 86_400_000
_NUM_MOVES = 3


def describe(explanation: ExplanationRecord) -> list[str]:
    """Return the explanation as sentences, the most important first."""
    if explanation.outcome != "ok":
        return [f"Refused with {explanation.outcome}: {explanation.message}.", _request_sentence(explanation)]
    sentences = [
        _answer_sentence(explanation),
        reason_sentence(explanation),
        _list_sentence(explanation),
        _mix_sentence(explanation),
        _wish_sentence(explanation),
        _rules_sentence(explanation),
        *_llm_sentences(explanation),
        _deadline_sentence(explanation),
        _longest_stage_sentence(explanation),
        _age_sentence(explanation),
        _request_sentence(explanation),
    ]
    return [sentence for sentence in sentences if sentence]


def reason_sentence(explanation: ExplanationRecord) -> str:
    """Return why this tier answered, with the deciding numbers."""
    text = REASONS[Reason(explanation.reason or "")]
    template = text.planned if explanation.reason == explanation.planned_reason else text.ended
    facts = explanation.facts
    if template is None or not facts:  # a shed request has no facts, and its template needs none
        return template or text.meaning
    numbers = {"predicted_ms": facts["predicted_s"] * 1_000, "budget_ms": facts["budget_s"] * 1_000}
    return template.format(**facts, **numbers, planned_reason=explanation.planned_reason)


def longest_stage(explanation: ExplanationRecord) -> StageTime | None:
    """Return the longest stage; `rank` counts only if neither `llm` nor `student` ran inside it."""
    names = {stage.name for stage in explanation.stages}
    leaves = [stage for stage in explanation.stages if stage.name != "rank" or not names & {"llm", "student"}]
    return max(leaves, key=lambda stage: stage.duration_ms, default=None)


def _answer_sentence(explanation: ExplanationRecord) -> str:
    items = f"{explanation.num_items} of {explanation.k} items"
    return (
        f"Answered by {explanation.tier} ({explanation.reason}) with {items}, from bundle {explanation.bundle_version}."
    )


def _list_sentence(explanation: ExplanationRecord) -> str:
    is_used = explanation.tier == Tier.PRECOMPUTED
    return "" if is_used else _LIST_SENTENCES.get(explanation.list_state or "", "")


def _mix_sentence(explanation: ExplanationRecord) -> str:
    """Return the sentence on the sources of the first items' scores: each source's fraction of their sum."""
    total = sum(item.score for item in explanation.mixed)
    if not total:
        return ""
    names = dict.fromkeys(name for item in explanation.mixed for name in item.by_source)
    sums = {name: sum(item.by_source.get(name, 0.0) for item in explanation.mixed) for name in names}
    parts = ", ".join(f"{name} {part / total:.0%}" for name, part in sums.items())
    return f"The scores of the first {len(explanation.mixed)} items come from: {parts}."


def _wish_sentence(explanation: ExplanationRecord) -> str:
    """Return the sentence on the wish: its understood terms, and how many positions it changed."""
    understood = explanation.understood
    if understood is None:
        return ""
    named = {"with": understood.must, "without": understood.must_not, "like": understood.liked}
    parts = [f"{word} {', '.join(terms)}" for word, terms in named.items() if terms] or ["nothing known"]
    relaxed = f", not applying {' and '.join(understood.relaxed)}, which left no item" if understood.relaxed else ""
    num_moved = sum(item.before != item.after for item in explanation.wished)
    return f"The wish was read as {'; '.join(parts)}{relaxed}; it changed {num_moved} places."


def _rules_sentence(explanation: ExplanationRecord) -> str:
    """Return the sentence on the rules: their names, and the first moved items with positions before and after."""
    moved = [item for item in explanation.ruled if item.before != item.after]
    if not explanation.ruled:
        return ""
    if not moved:
        return "The rules left the ranking as it was."
    names = dict.fromkeys(name for item in explanation.ruled for name in item.rules)
    brought = [item for item in moved if item.after is not None][:_NUM_MOVES]
    parts = [f"{item.item_id} from {item.before or 'outside'} to {item.after}" for item in brought]
    return f"The rules {', '.join(names)} changed {len(moved)} places, for example {', '.join(parts)}."


def _llm_sentences(explanation: ExplanationRecord) -> list[str]:
    llm = explanation.llm
    if llm is None or llm.queue_ms is None or llm.compute_ms is None or llm.decode_ms is None:
        return []
    steps = "1 step" if llm.num_steps == 1 else f"{llm.num_steps} steps"
    parts = f"prefill {llm.compute_ms - llm.decode_ms:.1f}, decode {llm.decode_ms:.1f}"
    call_ms = next((stage.duration_ms for stage in explanation.stages if stage.name == "llm"), 0.0)
    transport_ms = max(0.0, call_ms - llm.queue_ms - llm.compute_ms)
    spent = f"waited {llm.queue_ms:.1f} ms in its queue and computed {llm.compute_ms:.1f} ms in {steps} ({parts})"
    return [
        f"The LLM {spent}; transport took {transport_ms:.1f} ms.",
        f"{llm.num_cached_tokens} of {llm.num_prompt_tokens} prompt tokens came from the prefix cache.",
    ]


def _deadline_sentence(explanation: ExplanationRecord) -> str:
    if explanation.elapsed_ms is None or explanation.deadline_ms is None:
        return ""
    left_ms = explanation.deadline_ms - explanation.elapsed_ms
    verdict = f"in time, {left_ms:.1f} ms to spare" if left_ms >= 0 else f"late by {-left_ms:.1f} ms"
    return f"It took {explanation.elapsed_ms:.1f} ms of a deadline of {explanation.deadline_ms} ms: {verdict}."


def _longest_stage_sentence(explanation: ExplanationRecord) -> str:
    longest = longest_stage(explanation)
    if longest is None or not explanation.elapsed_ms:
        return ""
    share = longest.duration_ms / explanation.elapsed_ms
    return f"The longest stage was {longest.name}: {longest.duration_ms:.1f} ms, {share:.0%} of the whole."


def _age_sentence(explanation: ExplanationRecord) -> str:
    age_ms = explanation.feature_age_ms
    if age_ms is None:
        return ""
    age = f"{age_ms / _DAY_MS:,.1f} days" if age_ms >= _DAY_MS else f"{age_ms / 1_000:.1f} s"
    return f"The newest event that it took into account was {age} old."


def _request_sentence(explanation: ExplanationRecord) -> str:
    moment = datetime.fromtimestamp(explanation.at_unix_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    caller = f" of caller {explanation.caller}, priority {explanation.priority}," if explanation.caller else ""
    surface = f" for the surface {explanation.surface}" if explanation.surface else ""
    if explanation.variant:
        parts = [part.partition("=") for part in explanation.variant.split(",")]
        surface += f", in {' and '.join(f'variant {variant} of {experiment}' for experiment, _, variant in parts)},"
    return f"Request {explanation.request_id}{surface}{caller} through {explanation.door} at {moment}."
