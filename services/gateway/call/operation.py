"""The declaration of an HTTP operation, the source of its route and its part of the OpenAPI document. No behaviour."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message as Protobuf

from services.contracts.access import Scope
from services.contracts.message import Message
from services.errors import ErrorKind, TailraceError

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class ListOf:
    """The model of a body that is a list of one or more messages."""

    name: str
    item: type[Message]
    description: str


Model = type[Message] | ListOf


def component_of(model: Model) -> str:
    """Return the name of a model in the document."""
    if isinstance(model, ListOf):
        return model.name
    name = model.__name__
    return model.component or (name if name.endswith("Body") else f"{name}Body")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFormat:
    """The error format of a door: a status by kind, and a body.

    `body` takes an error and the request id; `no_route` takes a code, the problem, the fix and the request id, for
    unknown paths and methods. `model` describes both bodies.
    """

    model: Model
    status: Mapping[ErrorKind, int]
    body: Callable[[TailraceError, str], object]
    no_route: Callable[[str, str, str, str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A header (`where` is "header") or a part of the path ("path") or query ("query"), with its JSON schema."""

    name: str
    where: str
    schema: Mapping[str, Any]
    description: str
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class OperationAnswer:
    """One successful answer: its content by media type. A None model is a string; empty content is an empty body."""

    description: str
    content: Mapping[str, Model | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rpc:
    """The gRPC method of an operation: its name, and the types of its request and its answer."""

    method: str
    request: type[Protobuf]
    answer: type[Protobuf]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Attributes:
        name: Unique; the `operationId`.
        path: With its parameters, for example `/v1/models/{model_id}`; each parameter but `model_id` is one segment.
        scope: Required scope of the caller's key. None: open to all callers, neither guarded nor traced.
        errors: The error format.
        kinds: Error kinds specific to this operation; `all_kinds` adds those implied by the other fields.
        bodies: Alternative models of the request body; empty: the operation reads no body.
        examples: Valid bodies.
        answers: By status.
        headers: Sent with every answer.
        is_traced: Whether each call is a span.
        is_audited: Whether each call writes an audit line.
        is_private: Whether the audit line shows the path template instead of the sent path, which names a user.
        is_described: Whether the OpenAPI document includes it.
        for_tenants: Whether keys of tenants may call it: it then goes through `services.gateway.tenant_plane`, or is
            about text, which has no ids of users or items. The other operations show or change the whole stack.
        rpc: The same operation at the gRPC door, with the same scope, spans and audit lines; None: REST only.
    """

    name: str
    method: str
    path: str
    summary: str
    scope: Scope | None
    errors: ErrorFormat
    answers: Mapping[int, OperationAnswer]
    kinds: frozenset[ErrorKind] = frozenset()
    parameters: tuple[Parameter, ...] = ()
    bodies: tuple[Model, ...] = ()
    examples: tuple[Any, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    is_traced: bool = False
    is_audited: bool = False
    is_private: bool = False
    is_described: bool = True
    for_tenants: bool = False
    rpc: Rpc | None = None

    @property
    def required_scope(self) -> Scope:
        """The scope of a guarded operation."""
        assert self.scope is not None, "an open operation is not guarded"
        return self.scope

    @property
    def all_kinds(self) -> frozenset[ErrorKind]:
        """Every error kind that the operation can answer with."""
        kinds = set(self.kinds)
        if self.scope is not None:
            kinds |= {ErrorKind.INVALID_REQUEST, ErrorKind.INTERNAL}  # any request id may be malformed
            kinds |= {ErrorKind.UNAUTHENTICATED, ErrorKind.NOT_ALLOWED, ErrorKind.QUOTA}
        if self.bodies:
            kinds |= {ErrorKind.TOO_LARGE}
        return frozenset(kinds)


def json_answer(model: Model, description: str = "OK") -> Mapping[int, OperationAnswer]:
    return {200: OperationAnswer(description, {JSON: model})}
