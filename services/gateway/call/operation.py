"""What one HTTP operation takes and answers: its route and its part of the OpenAPI document both come from this. No behaviour."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from services.contracts.access import Scope
from services.errors import ErrorKind, TailraceError

JSON = "application/json"
PRINTABLE = r"^[\p{L}\p{M}\p{N}\p{P}\p{S} ]*$"
"""What `str.isprintable` allows, as a pattern of JSON schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFormat:
    """How one door writes errors: a status by kind, and a body.

    `body` takes an error and the request's id; `no_route` takes a code, the problem, the fix and the request's id, for paths and
    methods that do not exist. `model` describes both bodies.
    """

    model: type[BaseModel]
    status: Mapping[ErrorKind, int]
    body: Callable[[TailraceError, str], Mapping[str, Any]]
    no_route: Callable[[str, str, str, str], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A header (`where` is "header"), a part of the path ("path") or of the query ("query"), with its JSON schema."""

    name: str
    where: str
    schema: Mapping[str, Any]
    description: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that is no error: its content by media type. None: described as a string; no content: an empty body."""

    description: str
    content: Mapping[str, type[BaseModel] | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        name: Unique; the `operationId`.
        path: With its parameters, for example `/v1/models/{model_id}`; each is one segment.
        scope: What the caller's key must allow. None: open to everybody, and neither guarded nor traced.
        errors: How errors are written.
        kinds: The kinds of errors that only this operation can have; `all_kinds` adds those that follow from the other fields.
        bodies: Models of which the request's body must be one; none: the operation reads no body.
        examples: Bodies that are accepted.
        answers: By status.
        headers: Sent with every answer.
        is_traced: Whether each call is a span.
        is_audited: Whether each call leaves an audit line.
        is_private: Whether that line has the operation's path as it is described, since the path that was sent names a user.
        is_described: Whether the OpenAPI document has it.
    """

    name: str
    method: str
    path: str
    summary: str
    scope: Scope | None
    errors: ErrorFormat
    answers: Mapping[int, Answer]
    kinds: frozenset[ErrorKind] = frozenset()
    parameters: tuple[Parameter, ...] = ()
    bodies: tuple[type[BaseModel], ...] = ()
    examples: tuple[Any, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    is_traced: bool = False
    is_audited: bool = False
    is_private: bool = False
    is_described: bool = True

    @property
    def all_kinds(self) -> frozenset[ErrorKind]:
        """Every kind of error that the operation can answer with."""
        kinds = set(self.kinds)
        if self.scope is not None:
            kinds |= {ErrorKind.INVALID_REQUEST, ErrorKind.INTERNAL}  # any request id may be malformed
            kinds |= {ErrorKind.UNAUTHENTICATED, ErrorKind.NOT_ALLOWED, ErrorKind.QUOTA}
        if self.bodies:
            kinds |= {ErrorKind.TOO_LARGE}
        return frozenset(kinds)


def json_answer(model: type[BaseModel], description: str = "OK") -> Mapping[int, Answer]:
    """Return the answers of an operation that has one, in JSON."""
    return {200: Answer(description, {JSON: model})}
