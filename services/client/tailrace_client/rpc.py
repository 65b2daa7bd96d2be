"""The gRPC door: one attempt of a call, over grpc. Does not retry.

The messages are built from `messages.binpb` (`make proto`), in a separate descriptor pool, so they do not conflict with
other versions of them in the process or with its version of protobuf.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from tailrace_client.address import Address, Tls
from tailrace_client.answers import READERS
from tailrace_client.calls import A, ClientCall, Recorded
from tailrace_client.items import CatalogueItem, ItemDeleted, ItemsPut, message_of
from tailrace_client.retry import Attempts, TailraceError, late
from tailrace_client.values import refusal

_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),  # by default every call fails for a second
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # maximum time of one connection attempt
    ("grpc.enable_retries", 0),  # only this client retries, and counts retries
    ("grpc.use_local_subchannel_pool", 1),  # each client has separate connections
)
_CODES = {
    "INVALID_ARGUMENT": "invalid_request",
    "UNAUTHENTICATED": "unauthenticated",
    "PERMISSION_DENIED": "not_allowed",
    "NOT_FOUND": "not_found",
    "RESOURCE_EXHAUSTED": "overloaded",
    "UNAVAILABLE": "unreachable",
    "DEADLINE_EXCEEDED": "deadline_exceeded",
}
"""For statuses without details; the server's own statuses have them."""
_OF_ITEMS = (CatalogueItem, ItemsPut, ItemDeleted)


def _message_types() -> Callable[[str], Any]:
    """Return a function from a message's full name to its class."""
    pool = descriptor_pool.DescriptorPool()
    stored = files(__package__).joinpath("messages.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(stored).file:
        pool.AddSerializedFile(file.SerializeToString())
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


_message = _message_types()
_METHODS: dict[str, tuple[Any, Any]] = {
    "Recommend": (_message("tailrace.v1.RecommendRequest"), _message("tailrace.v1.RecommendResponse")),
    "RecommendBatch": (
        _message("tailrace.v1.RecommendBatchRequest"),
        _message("tailrace.v1.RecommendBatchResponse"),
    ),
    "SimilarItems": (_message("tailrace.v1.SimilarItemsRequest"), _message("tailrace.v1.RecommendResponse")),
    "Popular": (_message("tailrace.v1.PopularRequest"), _message("tailrace.v1.RecommendResponse")),
    "Search": (_message("tailrace.v1.SearchRequest"), _message("tailrace.v1.RecommendResponse")),
    "Assign": (_message("tailrace.v1.AssignRequest"), _message("tailrace.v1.AssignResponse")),
    "RecordEvents": (_message("tailrace.v1.RecordEventsRequest"), _message("tailrace.v1.RecordEventsResponse")),
    "EraseUser": (_message("tailrace.v1.EraseUserRequest"), _message("tailrace.v1.ErasureReceipt")),
    "GetErasure": (_message("tailrace.v1.GetErasureRequest"), _message("tailrace.v1.ErasureReceipt")),
    "PutItems": (_message("tailrace.v1.PutItemsRequest"), _message("tailrace.v1.PutItemsResponse")),
    "PatchItem": (_message("tailrace.v1.PatchItemRequest"), _message("tailrace.v1.CatalogueItem")),
    "GetItem": (_message("tailrace.v1.GetItemRequest"), _message("tailrace.v1.CatalogueItem")),
    "DeleteItems": (_message("tailrace.v1.DeleteItemsRequest"), _message("tailrace.v1.DeleteItemsResponse")),
}
_Status, _BadRequest, _RequestInfo, _RetryInfo, _ErrorInfo = (
    _message(f"google.rpc.{name}") for name in ("Status", "BadRequest", "RequestInfo", "RetryInfo", "ErrorInfo")
)


class RpcTransport:
    """From synchronous code."""

    def __init__(self, address: Address, headers: Mapping[str, str], tls: Tls | None) -> None:
        self._channel = _channel(grpc, address, headers, tls)
        self._methods = _methods(self._channel)
        self._metadata = _metadata(headers)
        self.close = self._channel.close

    def send(self, call: ClientCall[A], attempts: Attempts) -> A:
        """Make one attempt. Raises TailraceError."""
        send, message, timeout_s = _attempt(self._methods, call, attempts)
        try:
            answer = send(
                message,
                timeout=timeout_s,
                metadata=self._metadata + tuple(call.headers.items()),
                wait_for_ready=attempts.num > 1,
            )
        except grpc.RpcError as error:
            raise _refusal(error, call.request_id) from None
        return _read(call, answer, attempts.num)


class AsyncRpcTransport:
    """From asynchronous code."""

    def __init__(self, address: Address, headers: Mapping[str, str], tls: Tls | None) -> None:
        self._channel = _channel(grpc.aio, address, headers, tls)
        self._methods = _methods(self._channel)
        self._metadata = _metadata(headers)

    async def close(self) -> None:
        await self._channel.close(None)

    async def send(self, call: ClientCall[A], attempts: Attempts) -> A:
        """Make one attempt. Raises TailraceError."""
        send, message, timeout_s = _attempt(self._methods, call, attempts)
        try:
            answer = await send(
                message,
                timeout=timeout_s,
                metadata=self._metadata + tuple(call.headers.items()),
                wait_for_ready=attempts.num > 1,
            )
        except grpc.aio.AioRpcError as error:
            raise _refusal(error, call.request_id) from None
        return _read(call, answer, attempts.num)


def _channel(kind: Any, address: Address, headers: Mapping[str, str], tls: Tls | None) -> Any:
    options = [*_OPTIONS, ("grpc.primary_user_agent", headers["user-agent"])]
    if not address.is_encrypted:
        return kind.insecure_channel(address.host_port, options=options)
    credentials = grpc.ssl_channel_credentials(*(tls or Tls()).pems())
    return kind.secure_channel(address.host_port, credentials, options=options)


def _methods(channel: Any) -> dict[str, Any]:
    return {
        name: channel.unary_unary(f"/tailrace.v1.Recommender/{name}", sent.SerializeToString, received.FromString)
        for name, (sent, received) in _METHODS.items()
    }


def _metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in headers.items() if name != "user-agent")


def _attempt(methods: dict[str, Any], call: ClientCall[Any], attempts: Attempts) -> tuple[Any, Any, float]:
    """Return the method, its message and its timeout. Raises TailraceError."""
    if call.method is None:
        raise ValueError("the gRPC door does not have this call; make a client of the http:// address for it")
    now_s = time.monotonic()
    timeout_s = attempts.left_s(now_s)
    fields = call.with_deadline(attempts.server_deadline_ms(now_s))
    if call.answer in _OF_ITEMS:
        fields = message_of(call.method, fields)
    if call.rpc_only is not None:
        fields = {**call.rpc_only, "request": fields}
    return methods[call.method], _message_of(call, _METHODS[call.method][0], fields), timeout_s


def _message_of(call: ClientCall[Any], kind: Any, fields: dict[str, Any]) -> Any:
    """Return the message; filters and rules have the same JSON form as in REST.

    Raises TailraceError for fields outside the message.
    """
    if call.answer is Recorded:  # flat, and many of them
        return kind(**fields)
    try:
        return json_format.ParseDict(fields, kind())
    except (json_format.ParseError, OverflowError) as error:
        field = "items" if call.answer in _OF_ITEMS else "filters or rules"
        raise refusal(field, str(error), "send what recommend.proto has", call.request_id) from None


def _refusal(error: Any, request_id: str | None) -> TailraceError:
    trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
    status, stored = error.code().name, trailers.get("grpc-status-details-bin")
    if status == "DEADLINE_EXCEEDED" and stored is None:
        return late()
    fields = _details(_Status.FromString(stored).details if stored is not None else ())
    if stored is None and status not in _CODES:  # another server's answer, such as that of the REST door
        fields["fix"] = (
            "check that grpc:// has the port of the gRPC door (9000 by default), http:// that of REST (8000)"
        )
    return TailraceError(
        fields.pop("code", _CODES.get(status, "internal")),
        fields.pop("message", error.details() or status),
        request_id=fields.pop("request_id", None) or trailers.get("x-request-id") or request_id,
        **fields,
    )


def _details(details: Sequence[Any]) -> dict[str, Any]:
    """Read the details of an error: its code and fix, the request's id, the field, and when to retry."""
    fields: dict[str, Any] = {}
    for detail in details:
        match detail.type_url.rpartition("/")[2]:
            case "google.rpc.ErrorInfo":
                info = _ErrorInfo.FromString(detail.value)
                known = {name: info.metadata[name] for name in ("message", "fix") if name in info.metadata}
                fields |= {"code": info.reason.lower(), **known}
            case "google.rpc.RequestInfo":
                fields["request_id"] = _RequestInfo.FromString(detail.value).request_id
            case "google.rpc.BadRequest":
                fields["field"] = _BadRequest.FromString(detail.value).field_violations[0].field
            case "google.rpc.RetryInfo":
                delay = _RetryInfo.FromString(detail.value).retry_delay
                fields["retry_after_s"] = delay.seconds + delay.nanos / 1e9
    return fields


def _read(call: ClientCall[A], answer: Any, num_attempts: int) -> A:
    read: A = READERS[call.answer](_plain(answer), num_attempts)
    return read


def _plain(message: Any) -> Any:
    """Return a message in the form of its JSON over REST; absent fields are None."""
    kind = message.DESCRIPTOR
    if kind.name == "Texts":
        return list(message.texts)
    if [oneof.name for oneof in kind.oneofs] == ["value"]:
        return _value(getattr(message, message.WhichOneof("value")))
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else _value(getattr(message, field.name))
        for field in kind.fields
    }


def _value(value: Any) -> Any:
    if hasattr(value, "DESCRIPTOR"):
        return _plain(value)
    if isinstance(value, Mapping):
        return {key: _value(entry) for key, entry in value.items()}
    return (
        value
        if isinstance(value, str | bytes) or not isinstance(value, Sequence)
        else [_value(entry) for entry in value]
    )
