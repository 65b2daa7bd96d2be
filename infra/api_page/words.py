"""What tiers, reasons and error codes mean to a caller. Each has its words; a new one without them fails the test of the page."""

from collections.abc import Mapping

from services.contracts.recommend import Reason, Tier
from services.gateway.call.error_table import ErrorKind

TIERS: Mapping[Tier, str] = {
    Tier.PRECOMPUTED: "the list stored for this user: made by the live bundle, no event of the user is newer",
    Tier.LLM: "the decoder, within the deadline",
    Tier.STUDENT: "the small model distilled from the decoder, in the gateway's process",
    Tier.POPULAR: "recent popularity, from memory",
}
REASONS: Mapping[Reason, str] = {
    Reason.PRECOMPUTED_FRESH: "the stored list is fresh",
    Reason.LLM_IN_TIME: "the decoder was predicted to be in time, and was",
    Reason.UNKNOWN_USER: "nothing is known of this user",
    Reason.SHORT_HISTORY: "too few known items for the decoder",
    Reason.LLM_OVERLOADED: "the decoder has no place free for this caller",
    Reason.LLM_TOO_SLOW: "the decoder was predicted to be late, so it was not asked",
    Reason.LLM_LATE: "the decoder was asked and was late",
    Reason.LLM_AWAY: "the decoder is away",
    Reason.LLM_FAILED: "the decoder failed",
    Reason.BUNDLE_MISMATCH: "decoder and gateway hold different bundles (for a moment, during a promotion)",
    Reason.FEATURES_AWAY: "the feature store did not answer in its share of the deadline",
    Reason.STUDENT_FAILED: "the student failed",
    Reason.SHED: "the gateway is under strain and this caller's class gives way",
    Reason.EVERYTHING_SEEN: "the user has seen every item that may be shown, so seen ones are shown again",
    Reason.NOTHING_ALLOWED: "filters and exclusions leave no item",
}
ERRORS: Mapping[ErrorKind, str] = {
    ErrorKind.INVALID_REQUEST: "a field is wrong: `field` names it, `fix` says what to send",
    ErrorKind.TOO_LARGE: "the body is larger than the door takes",
    ErrorKind.UNAUTHENTICATED: "no API key, or none that is valid now",
    ErrorKind.NOT_ALLOWED: "the key lacks the scope that the call needs",
    ErrorKind.NOT_FOUND: "what was asked for is not kept",
    ErrorKind.QUOTA: "the key's rate or quota is used up; come back after `retry-after`",
    ErrorKind.OVERLOADED: "we could, but not now; come back after `retry-after`",
    ErrorKind.AWAY: "a dependency is away and nothing was done; come back after `retry-after`",
    ErrorKind.LATE: "a stage ran out of time",
    ErrorKind.INTERNAL: "something broke on our side; it is logged under the request id",
}
