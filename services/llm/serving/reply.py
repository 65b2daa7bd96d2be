"""A replica's reply: a result, or a refusal as a small value.

Ray pickles replies, and errors with fields do not pickle. Refusals as values also cost no traceback and no log line;
the handle turns them back into errors.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.contracts.rank import RankResult
from services.errors import (
    BundleMismatch,
    BundleNotFound,
    ContextTooLong,
    DeadlineExceeded,
    DependencyUnavailable,
    InvalidRequest,
    ModelLoading,
    NotFound,
    Overloaded,
    SchemaViolated,
    TailraceError,
)

LLM = "the LLM"
TEXT = "the text model"
_STAGES = {LLM: "llm", TEXT: "text"}
_RETRY_AFTER_S = 1.0


class RefusalKind(StrEnum):
    """Reason of a refusal."""

    OVERLOADED = "overloaded"
    LATE = "late"
    OTHER_BUNDLE = "other_bundle"
    NO_BUNDLE = "no_bundle"
    LOADING = "loading"
    INVALID = "invalid"
    TOO_LONG = "too_long"
    UNKNOWN = "unknown"
    VIOLATED = "violated"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal and its error's details.

    Versions wanted and loaded; a model name; field, problem and fix; or seconds to wait.
    """

    kind: RefusalKind
    details: tuple[str, ...] = ()

    def as_error(self, part: str = LLM) -> TailraceError:
        match self.kind:
            case RefusalKind.OVERLOADED:
                return Overloaded(part, float(self.details[0]))
            case RefusalKind.LATE:
                return DeadlineExceeded(_STAGES[part])
            case RefusalKind.OTHER_BUNDLE:
                return BundleMismatch(*self.details)
            case RefusalKind.NO_BUNDLE:
                return BundleNotFound("no bundle is loaded yet; run `tailrace pipeline`")
            case RefusalKind.LOADING:
                return ModelLoading(*self.details)
            case RefusalKind.INVALID:
                return InvalidRequest(*self.details)
            case RefusalKind.TOO_LONG:
                return ContextTooLong(*self.details)
            case RefusalKind.UNKNOWN:
                return NotFound(*self.details)
            case RefusalKind.VIOLATED:
                return SchemaViolated(*self.details)
            case RefusalKind.BROKEN:
                return DependencyUnavailable(part, _RETRY_AFTER_S)


Reply = RankResult | Refusal


def refusal_of(error: TailraceError) -> Refusal:
    """Return the refusal for this error; BROKEN for unexpected errors."""
    match error:
        case Overloaded():
            return Refusal(RefusalKind.OVERLOADED, (str(error.retry_after_s),))
        case DeadlineExceeded():
            return Refusal(RefusalKind.LATE)
        case BundleMismatch():
            return Refusal(RefusalKind.OTHER_BUNDLE, (error.wanted, error.loaded))
        case BundleNotFound():
            return Refusal(RefusalKind.NO_BUNDLE)
        case ModelLoading():
            return Refusal(RefusalKind.LOADING, (error.name,))
        case InvalidRequest():
            kind = RefusalKind.TOO_LONG if isinstance(error, ContextTooLong) else RefusalKind.INVALID
            return Refusal(kind, (error.field, error.problem, error.fix))
        case NotFound():
            return Refusal(RefusalKind.UNKNOWN, (error.problem, error.fix))
        case SchemaViolated():
            return Refusal(RefusalKind.VIOLATED, (error.violation,))
        case _:
            return Refusal(RefusalKind.BROKEN)
