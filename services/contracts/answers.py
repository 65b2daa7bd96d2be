"""Answers that several operations share: errors, status, and the live bundle."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from services.contracts.message import Answer, Custom
from services.contracts.recommend import Recommendation
from services.errors import TailraceError


class Status(Answer, frozen=True):
    """A short answer."""

    status: Annotated[str, Meta(examples=["ok"])]


class ErrorDetail(Answer, frozen=True):
    """One error; `field` and `fix` when the caller can correct it."""

    component: ClassVar = "ErrorDetail"

    code: Annotated[str, Meta(examples=["invalid_request"])]
    message: str
    field: str | None
    fix: str | None
    request_id: str

    @classmethod
    def of(cls, error: TailraceError, request_id: str) -> "ErrorDetail":
        return cls(
            code=error.kind.value, message=error.problem, field=error.field, fix=error.fix, request_id=request_id
        )


class ErrorBody(Answer, frozen=True):
    """The body of every error."""

    error: ErrorDetail


class CanaryInfo(Answer, frozen=True):
    """A release in progress."""

    component: ClassVar = "CanaryBody"

    version: str
    share: Annotated[float, Meta(description="Fraction of the users who get this version now")]


class BundleInfo(Answer, frozen=True, kw_only=True):
    """The live bundle of a model name."""

    component: ClassVar = "BundleBody"

    name: str
    version: str
    num_items: Annotated[int, Meta(description="In its catalogue")]
    code_depth: Annotated[int, Meta(description="Codes per item")]
    manifest: Annotated[Mapping[str, Any], Meta(description="How it was made, and how it was evaluated")]
    canary: Annotated[
        CanaryInfo | None, Meta(description="The release in progress; null: none, or its bundle is not loaded yet")
    ]


class BatchOutcome(Custom):
    """A recommendation or an error."""

    @classmethod
    def forms(cls) -> tuple[type[Any], ...]:
        return Recommendation, ErrorBody


class BatchAnswersBody(Answer, frozen=True):
    """The answers, in the order of the requests."""

    answers: Annotated[
        tuple[BatchOutcome, ...],
        Meta(description="Each a recommendation, or the error that this request would get by itself"),
    ]
