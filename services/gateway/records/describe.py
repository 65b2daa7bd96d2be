"""An explanation in plain sentences: who answered and why, what the LLM did, where the time went, whether it was in time. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime

from services.contracts.explanation import Explanation, ListState, StageTime
from services.contracts.recommend import Reason, Tier

_DECIDED: Mapping[Reason, str] = {
    Reason.PRECOMPUTED_FRESH: "The stored list was made by the live bundle and has seen every event of the user.",
    Reason.LLM_IN_TIME: "The LLM was predicted to need {predicted_ms:.1f} ms of the {budget_ms:.1f} ms that were left, and it answered in time.",
    Reason.UNKNOWN_USER: "Nothing is known of this user, so there was nothing to rank by.",
    Reason.SHORT_HISTORY: "{num_history} known items are too few for the LLM, which is asked from {min_history_for_llm} on.",
    Reason.LLM_OVERLOADED: "All {max_in_flight} places that this caller's class may fill at the LLM were taken ({num_in_flight} in flight).",
    Reason.LLM_TOO_SLOW: "The LLM was predicted to need {predicted_ms:.1f} ms and only {budget_ms:.1f} ms were left, so it was not asked.",
    Reason.LLM_AWAY: "The breaker was open after repeated failures of the LLM, so it was not asked.",
    Reason.FEATURES_AWAY: "The feature store did not answer in its share of the deadline, so the user's seen items were not known.",
    Reason.SHED: "The gateway was under strain and shed this caller's class: it was answered from memory, nothing was read.",
    Reason.EVERYTHING_SEEN: "The user has seen every item that may be shown, so seen ones are shown again.",
    Reason.NOTHING_ALLOWED: "The filters and exclusions leave no item at all.",
}
"""Why the policy decided so before anything was ranked."""

_ENDED: Mapping[Reason, str] = {
    Reason.LLM_IN_TIME: _DECIDED[Reason.LLM_IN_TIME],
    Reason.LLM_LATE: "The LLM was asked, predicted to need {predicted_ms:.1f} ms of {budget_ms:.1f} ms, but its answer had not come when the time was up.",
    Reason.LLM_OVERLOADED: "The LLM was asked and refused: its queue was full.",
    Reason.LLM_AWAY: "The LLM was asked and could not be reached.",
    Reason.LLM_FAILED: "The LLM was asked and failed.",
    Reason.BUNDLE_MISMATCH: "The LLM was asked and serves another bundle than this gateway.",
    Reason.STUDENT_FAILED: "The student was to answer ({planned_reason}) and could not rank.",
}
"""Why it ended otherwise than planned."""

_LIST_WORDS: Mapping[str, str] = {
    ListState.NONE: "No list is stored for the user.",
    ListState.OTHER_BUNDLE: "The stored list was not used: another bundle made it.",
    ListState.OLDER_THAN_EVENTS: "The stored list was not used: the user has done something since it was made.",
    ListState.DOES_NOT_COVER: "The stored list was not used: it does not hold enough of what this request may show.",
}


def sentences(explanation: Explanation) -> list[str]:
    """Tell it in plain sentences, the most important first."""
    if explanation.outcome != "ok":
        return [f"Refused with {explanation.outcome}: {explanation.message}.", _when(explanation)]
    told = [_who(explanation), why(explanation), _list_words(explanation), *_llm_words(explanation)]
    told += [_deadline_words(explanation), _longest_words(explanation), _age_words(explanation), _when(explanation)]
    return [sentence for sentence in told if sentence]


def why(explanation: Explanation) -> str:
    """Say in one sentence why this tier answered."""
    reason = Reason(explanation.reason or "")
    words = _DECIDED if explanation.reason == explanation.planned_reason else _ENDED
    facts = explanation.facts
    if not facts:  # shed: nothing was gathered
        return words[reason]
    predicted_s = facts["trial_s"] if facts["num_in_flight"] == 0 else facts["predicted_s"]
    numbers = {"predicted_ms": predicted_s * 1_000, "budget_ms": facts["budget_s"] * 1_000}
    return words[reason].format(**facts, **numbers, planned_reason=explanation.planned_reason)


def longest_stage(explanation: Explanation) -> StageTime | None:
    """Return the stage that took the most; `rank` counts only where it holds no other stage."""
    names = {stage.name for stage in explanation.stages}
    leaves = [stage for stage in explanation.stages if stage.name != "rank" or not names & {"llm", "student"}]
    return max(leaves, key=lambda stage: stage.duration_ms, default=None)


def _who(explanation: Explanation) -> str:
    items = f"{explanation.num_items} of {explanation.k} items"
    return (
        f"Answered by {explanation.tier} ({explanation.reason}) with {items}, from bundle {explanation.bundle_version}."
    )


def _list_words(explanation: Explanation) -> str:
    is_used = explanation.tier == Tier.PRECOMPUTED
    return "" if is_used else _LIST_WORDS.get(explanation.list_state or "", "")


def _llm_words(explanation: Explanation) -> list[str]:
    llm = explanation.llm
    if llm is None or llm.queue_ms is None or llm.compute_ms is None or llm.decode_ms is None:
        return []
    steps = "1 step" if llm.num_steps == 1 else f"{llm.num_steps} steps"
    parts = f"prefill {llm.compute_ms - llm.decode_ms:.1f}, decode {llm.decode_ms:.1f}"
    asked_ms = next((stage.duration_ms for stage in explanation.stages if stage.name == "llm"), 0.0)
    way_ms = max(0.0, asked_ms - llm.queue_ms - llm.compute_ms)
    spent = f"waited {llm.queue_ms:.1f} ms in its queue and computed {llm.compute_ms:.1f} ms in {steps} ({parts})"
    return [
        f"The LLM {spent}; the way there and back took {way_ms:.1f} ms.",
        f"{llm.num_cached_tokens} of {llm.num_prompt_tokens} prompt tokens came from the prefix cache.",
    ]


def _deadline_words(explanation: Explanation) -> str:
    if explanation.elapsed_ms is None or explanation.deadline_ms is None:
        return ""
    left_ms = explanation.deadline_ms - explanation.elapsed_ms
    verdict = f"in time, {left_ms:.1f} ms to spare" if left_ms >= 0 else f"late by {-left_ms:.1f} ms"
    return f"It took {explanation.elapsed_ms:.1f} ms of a deadline of {explanation.deadline_ms} ms: {verdict}."


def _longest_words(explanation: Explanation) -> str:
    longest = longest_stage(explanation)
    if longest is None or not explanation.elapsed_ms:
        return ""
    share = longest.duration_ms / explanation.elapsed_ms
    return f"The stage that took the most is {longest.name}: {longest.duration_ms:.1f} ms, {share:.0%} of the whole."


def _age_words(explanation: Explanation) -> str:
    age_ms = explanation.feature_age_ms
    return "" if age_ms is None else f"The newest event that it has seen was {age_ms / 1_000:.1f} s old."


def _when(explanation: Explanation) -> str:
    moment = datetime.fromtimestamp(explanation.at_unix_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    caller = f" of caller {explanation.caller}, priority {explanation.priority}," if explanation.caller else ""
    return f"Request {explanation.request_id}{caller} through {explanation.door} at {moment}."
