"""The page: prose, and tables from the doors' own descriptions. Reads code and .proto; writes nothing."""

from pathlib import Path

from infra.api_page import rest, rpc
from infra.api_page.tables import table
from services.contracts.events import MAX_EVENT_AGE_MS, MAX_EVENT_LEAD_MS, MAX_EVENTS_PER_REQUEST, REMEMBERED_EVENTS
from services.contracts.recommend import MAX_DEADLINE_MS, MAX_ID_CHARS, MAX_IDS_PER_FIELD, MAX_K
from services.gateway.call.openapi import ERROR_MEANINGS
from services.gateway.data_plane import DataPlane
from services.gateway.grpc.answers import STATUS as RPC_STATUS
from services.gateway.records.reasons import REASONS, TIERS
from services.gateway.rest.door import create_rest_app
from services.gateway.rest.operations import STATUS as REST_STATUS
from services.settings.settings import Settings

_PAGE = """# API: REST and gRPC

<!-- Made by `make docs` from the OpenAPI description, recommend.proto and the error tables. Do not edit. -->

Two doors, one set of fields: REST in JSON, gRPC in messages. A running gateway serves the same description as
[`/openapi.json`](http://localhost:8000/openapi.json), readable at [`/docs`](http://localhost:8000/docs), and gRPC server reflection. Where keys are set up, each call needs one
([Access](access.md)): `authorization: Bearer KEY` as a header or as metadata.

Ask, over REST:

```sh
curl -s localhost:8000/v1/recommendations -H 'content-type: application/json' -d '{{"user_id": "196", "k": 3}}'
```

```text
{{"request_id":"..."items":[{{"item_id":"..."title":"..."source":"..."tier":"..."reason":"..."bundle_version":"..."stages_ms":{{...}}}}
```

And over gRPC, from Python, with [the client](../services/client/README.md), which is the same over both doors:

```sh
python - <<'END'
from tailrace_client import Client
with Client("grpc://localhost:9000") as tailrace:
    answer = tailrace.recommend("196", k=3, deadline_ms=2000)
print("tier", answer.tier, "items", [item.item_id for item in answer.items])
END
```

```text
tier ... items [...]
```

## Who answers, and why

Every answer names its `tier`; each item names the tier that chose it (`source`), since a list that a tier cannot fill is topped up by the next.

{tiers}

`reason` says why that tier answered:

{reasons}

## The deadline

`deadline_ms` in the body, or `X-Deadline-Ms` as header (gRPC: metadata `x-deadline-ms`), counts from the request's arrival; without it {default_deadline_ms} ms hold. It is
brought into {min_deadline_ms} to {max_deadline_ms} ms (`TAILRACE_MIN_DEADLINE_MS`, `TAILRACE_MAX_DEADLINE_MS`), and the answer says which deadline held. What cannot be had in time is left out; the answer still comes.
That includes the rationale: it is written last ([Text](text.md#a-rationale-with-a-recommendation)).

## Limits

{limits}

## Errors

Over REST every error is one envelope with these five fields, but for the routes of the OpenAI API (`/v1/models`, `/v1/completions`, `/v1/chat/completions`), which answer in OpenAI's, with 400 for a
wrong request ([Text](text.md#limits)). An unknown path is 404 with the nearest one as the fix, an unknown method 405 (`method_not_allowed`) with those that exist, a path that [can be read in two ways](access.md) 400. `request_id` is the body's, the header's, or a new one:

```sh
curl -s localhost:8000/v1/recommendations -H 'content-type: application/json' -d '{{"user_id": "196", "k": 0}}'
```

```text
{{"error":{{"code":"invalid_request","message":"0 is out of range","field":"k","fix":"send 1 to {max_k}","request_id":"..."}}}}
```

Over gRPC it is a status with the same sentence; `grpc-status-details-bin` holds a `google.rpc.ErrorInfo` with the code in capitals as its reason and, in its metadata, `message` and `fix`, a `google.rpc.RequestInfo` with the request's id, a `google.rpc.BadRequest` with the field and a `google.rpc.RetryInfo` where waiting helps.

{errors}

Both doors and the edge send `retry-after` in whole seconds, at least 1; gRPC as a trailer, and its `RetryInfo` has the milliseconds. Repeating `Recommend` is always safe; events are safe to repeat when they carry an `event_id`, as those of the client do.

## REST

{rest}

## gRPC

From `{proto}`, for clients in any language; Python's is [tailrace_client](../services/client/README.md). `grpc.health.v1.Health` and server reflection answer too.

{rpc}
"""


def render(root: Path) -> str:
    """Return the page's text. `root` is the repository."""
    usual = Settings.model_construct()  # the defaults, whatever the environment says
    app = create_rest_app(_no_plane, lambda: b"", usual.max_body_bytes)
    return _PAGE.format(
        tiers=table(("tier", "what answers"), [(f"`{tier}`", text.meaning) for tier, text in TIERS.items()]),
        reasons=table(("reason", "meaning"), [(f"`{reason}`", text.meaning) for reason, text in REASONS.items()]),
        limits=table(("what", "limit"), _limits(usual)),
        errors=table(("code", "REST", "gRPC", "meaning"), _errors()),
        rest=rest.routes(app.openapi()),
        rpc=rpc.services(root),
        proto=rpc.PROTO,
        max_k=MAX_K,
        default_deadline_ms=usual.default_deadline_ms,
        min_deadline_ms=usual.min_deadline_ms,
        max_deadline_ms=usual.max_deadline_ms,
    )


def _limits(usual: Settings) -> list[tuple[str, str]]:
    return [
        ("`k`", f"1 to {min(MAX_K, usual.max_k)} (`TAILRACE_MAX_K`, at most {MAX_K})"),
        ("an id", f"1 to {MAX_ID_CHARS} printable characters"),
        ("a list of ids", f"{MAX_IDS_PER_FIELD} entries"),
        ("`deadline_ms`", f"1 to {MAX_DEADLINE_MS}"),
        ("a body or message", f"{usual.max_body_bytes} bytes (`TAILRACE_MAX_BODY_BYTES`)"),
        (
            "events in a request",
            f"{usual.max_events_per_request} (`TAILRACE_MAX_EVENTS_PER_REQUEST`, at most {MAX_EVENTS_PER_REQUEST})",
        ),
        ("a repeat's `event_id`", f"recognised among the {REMEMBERED_EVENTS} of its user that were seen last"),
        (
            "`event_time_ms`",
            f"at most {MAX_EVENT_AGE_MS // 86_400_000} days old, at most {MAX_EVENT_LEAD_MS // 1_000} s ahead; older events come by [the pipeline](bring-your-own-data.md)",
        ),
    ]


def _errors() -> list[tuple[str, str, str, str]]:
    return [(f"`{kind}`", str(REST_STATUS[kind]), RPC_STATUS[kind].name, text) for kind, text in ERROR_MEANINGS.items()]


def _no_plane() -> DataPlane:
    raise NotImplementedError("the page is made without answering anything")
