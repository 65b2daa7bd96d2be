"""What a replica answers when it cannot rank: a small value, since Ray pickles it and errors with fields do not pickle.

Expected refusals travel as values, so they cost no traceback and no log line; the handle turns them back into errors.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.contracts.rank import RankResult
from services.errors import (
    BundleMismatch,
    BundleNotFound,
    DeadlineExceeded,
    DependencyAway,
    InvalidRequest,
    Overloaded,
    TailraceError,
)

LLM = "the LLM"
_RETRY_AFTER_S = 1.0


class RefusalKind(StrEnum):
    """Why a replica does not answer."""

    OVERLOADED = "overloaded"
    LATE = "late"
    OTHER_BUNDLE = "other_bundle"
    NO_BUNDLE = "no_bundle"
    INVALID = "invalid"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal and what its error needs: versions wanted and loaded, or field, problem and fix, or seconds to wait."""

    kind: RefusalKind
    details: tuple[str, ...] = ()

    def as_error(self) -> TailraceError:
        """Give the error that this refusal stands for."""
        match self.kind:
            case RefusalKind.OVERLOADED:
                return Overloaded(LLM, float(self.details[0]))
            case RefusalKind.LATE:
                return DeadlineExceeded("llm")
            case RefusalKind.OTHER_BUNDLE:
                return BundleMismatch(*self.details)
            case RefusalKind.NO_BUNDLE:
                return BundleNotFound("no bundle is loaded yet; run `tailrace pipeline`")
            case RefusalKind.INVALID:
                return InvalidRequest(*self.details)
            case RefusalKind.BROKEN:
                return DependencyAway(LLM, _RETRY_AFTER_S)


Reply = RankResult | Refusal


def refusal_of(error: TailraceError) -> Refusal:
    """Give the refusal that carries this error. What is not expected here counts as broken."""
    match error:
        case Overloaded():
            return Refusal(RefusalKind.OVERLOADED, (str(error.retry_after_s),))
        case DeadlineExceeded():
            return Refusal(RefusalKind.LATE)
        case BundleMismatch():
            return Refusal(RefusalKind.OTHER_BUNDLE, (error.wanted, error.loaded))
        case BundleNotFound():
            return Refusal(RefusalKind.NO_BUNDLE)
        case InvalidRequest():
            return Refusal(RefusalKind.INVALID, (error.field, error.problem, error.fix))
        case _:
            return Refusal(RefusalKind.BROKEN)
