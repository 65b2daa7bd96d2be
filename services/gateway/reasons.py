"""Texts of each tier and reason: the single table for the OpenAPI document, the console and `tailrace explain`. Pure.

`meaning` is one sentence without numbers. `planned` and `ended` are the detailed sentences of an explanation, templates
over the policy's facts: for a reason of the plan before ranking, or of the end of ranking. If None, `meaning` is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.contracts.recommend import Reason, Tier


@dataclass(frozen=True, slots=True)
class TierText:
    """Texts of one tier."""

    title: str
    meaning: str


@dataclass(frozen=True, slots=True)
class ReasonText:
    """Texts of one reason."""

    meaning: str
    planned: str | None = None
    ended: str | None = None


TIERS: Mapping[Tier, TierText] = {
    Tier.PRECOMPUTED: TierText(
        "Stored list",
        "A list that the offline pipeline stored for this user. Used if the live bundle made it and no event of "
        "the user is newer.",
    ),
    Tier.LLM: TierText(
        "Language model",
        "The decoder generates the next items from the history. Called if its predicted finish meets the deadline.",
    ),
    Tier.STUDENT: TierText(
        "Student",
        "A small model distilled from the decoder, run in the gateway's process in under a millisecond. Always "
        "computed, so a late language model costs nothing.",
    ),
    Tier.SIMILAR: TierText(
        "Similar items",
        "The neighbours of the items that the request names, counted and computed by the pipeline. Answers only "
        "requests for similar items.",
    ),
    Tier.POPULAR: TierText(
        "Popular",
        "The items that are popular now, held in memory. Needs no network and cannot fail.",
    ),
}

_PREDICTION = "The LLM was predicted to need {predicted_ms:.1f} ms"

REASONS: Mapping[Reason, ReasonText] = {
    Reason.PRECOMPUTED_FRESH: ReasonText(
        "The stored list is up to date: no event of the user is newer.",
        planned="The stored list was made by the live bundle and covers every event of the user.",
    ),
    Reason.LLM_IN_TIME: ReasonText(
        "The language model was predicted to meet the deadline, and it did.",
        planned=_PREDICTION + " of the {budget_ms:.1f} ms that were left, and it answered in time.",
        ended=_PREDICTION + " of the {budget_ms:.1f} ms that were left, and it answered in time.",
    ),
    Reason.UNKNOWN_USER: ReasonText("No event of this user is known; the popular tier answered."),
    Reason.SHORT_HISTORY: ReasonText(
        "The history is too short for the language model.",
        planned="{num_history} known items are too few for the LLM, which is called from {min_history_for_llm} on.",
    ),
    Reason.STUDENT_SUFFICES: ReasonText(
        "For histories of this length the bundle's evaluation shows no gain of the language model over the student.",
        planned="For histories of {num_history} known items the bundle's evaluation shows no gain of the LLM "
        "over the student, so it was not called.",
    ),
    Reason.LLM_OVERLOADED: ReasonText(
        "The language model is at capacity; the student answered.",
        planned="All {max_in_flight} places that this caller's class may fill at the LLM were taken "
        "({num_in_flight} in flight).",
        ended="The LLM was called and refused: its queue was full.",
    ),
    Reason.LLM_TOO_SLOW: ReasonText(
        "The language model was predicted to miss the deadline, so it was not called; the student answered.",
        planned=_PREDICTION + " and only {budget_ms:.1f} ms were left, so it was not called.",
    ),
    Reason.LLM_LATE: ReasonText(
        "The language model was called and missed the deadline; the student answered.",
        ended="The LLM was called, predicted to need {predicted_ms:.1f} ms of {budget_ms:.1f} ms, and had not "
        "answered when the time was up.",
    ),
    Reason.LLM_UNAVAILABLE: ReasonText(
        "The language model is unavailable; the student answered.",
        planned="Every replica had failed or given no answer of late, so the LLM was not called.",
        ended="The LLM was called and could not be reached.",
    ),
    Reason.LLM_FAILED: ReasonText(
        "The language model failed; the student answered.",
        ended="The LLM was called and failed.",
    ),
    Reason.BUNDLE_MISMATCH: ReasonText(
        "The language model serves another bundle than the gateway, as it may for a moment during a promotion; "
        "the student answered.",
        ended="The LLM was called and serves another bundle than this gateway.",
    ),
    Reason.MODEL_LOADING: ReasonText(
        "The model was not in memory, so its load was started; a tier that needs no load answered.",
        planned="This gateway had not loaded the bundle yet, and knew only its popular items.",
        ended="The LLM was called, and its replica had not loaded this model yet.",
    ),
    Reason.FEATURES_UNAVAILABLE: ReasonText(
        "The feature store did not answer in its share of the deadline, so the user's history is not known.",
        planned="The feature store did not answer in its share of the deadline, so the user's seen items were "
        "not known.",
    ),
    Reason.STUDENT_FAILED: ReasonText(
        "The student failed or was not done in time; the popular tier answered.",
        ended="The student was to answer ({planned_reason}), and failed or was not done in time.",
    ),
    Reason.NOT_ON_SURFACE: ReasonText(
        "The request's surface does not allow the better tiers, so the next one answered.",
        planned="The request's surface does not allow a better tier.",
        ended="The tier that was called did not answer, and the request's surface does not allow the student.",
    ),
    Reason.SHED: ReasonText(
        "The gateway is overloaded, and requests of this priority class are answered from memory.",
        planned="The gateway was overloaded and shed this caller's class: it was answered from memory, nothing "
        "was read.",
    ),
    Reason.NOT_TRAINED: ReasonText(
        "The live bundle's models know no item that may be shown: it was made of items alone, or these are "
        "newer; the popular tier answered."
    ),
    Reason.SIMILAR_ASKED: ReasonText("The request asked for items like those that it names."),
    Reason.POPULAR_ASKED: ReasonText("The request asked for what is popular."),
    Reason.SEARCH_ASKED: ReasonText("The request searched for words, without a user."),
    Reason.WISH_NOT_READ: ReasonText(
        "The bundle has no reader of wishes, or it failed or was not done in time; the list is as without the wish."
    ),
    Reason.EVERYTHING_SEEN: ReasonText(
        "The user has seen every item that may be shown, so seen items are shown again."
    ),
    Reason.NOTHING_ALLOWED: ReasonText("The filters and exclusions leave no item."),
}
