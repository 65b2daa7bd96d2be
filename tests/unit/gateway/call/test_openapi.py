"""The OpenAPI document is exact: schemathesis calls every operation with valid and invalid requests."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from jsonschema import Draft202012Validator, validators
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from infra.openapi import PATH
from services.contracts.access import Allowance
from services.gateway.access.rates import RemainingCalls
from services.gateway.access.shared_rates import Standing
from services.gateway.call.http import HttpApp
from services.gateway.rest.door import create_rest_app
from tests.support.engine.parrot import MODEL, Parrot
from tests.unit.gateway.world import NOW_S, VERSION, catalogue_of, make_world, publish

MAX_BODY_BYTES = 1_000_000
WITHOUT_INPUT = {"GET /healthz", "GET /readyz", "GET /health"}
TEXT = {"POST /v1/completions", "POST /v1/chat/completions"}
OPERATIONS = sorted(
    f"{method.upper()} {path}" for path, methods in json.loads(PATH.read_text())["paths"].items() for method in methods
)
NOT_CHECKED = ("not_a_server_error", "ignored_auth")
"""503 and 504 are described, and the tests below check for 500. The document makes keys optional, since a server may
have none, so `ignored_auth` would accept everything; access/test_both_doors_with_keys.py tests which calls need a
key."""
NOT_FOR_TEXT = ("positive_data_acceptance",)
"""Some fields exclude or require each other (echo and logprobs, top_logprobs and logprobs, json_schema and its type),
and the server limits n and max_tokens; the body's schema cannot express either. A rejection must still be described."""
NOT_FOR_BATCHES = ("negative_data_rejection",)
"""A wrong entry is rejected individually, inside a successful answer."""
NOT_FOR_ASSIGNMENTS = ("positive_data_acceptance",)
"""One of two parameters is required, which the document cannot express."""
NOT_FOR_ITEMS = ("positive_data_acceptance",)
"""An entry may be anything, since it is rejected individually; a call without a valid entry is rejected."""
NOT_FOR_SEARCHES = ("positive_data_acceptance",)
"""A surface must be configured, which the document cannot express; no surface is here."""
NUM_SAMPLED, NUM_IN_GRID = 3, 60


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> HttpApp:
    """Both HTTP doors over a request path on fakes that generates text."""
    root: Path = tmp_path_factory.mktemp("openapi") / "bundles"
    publish(root, VERSION, catalogue_of())
    world = make_world(root, Parrot())
    asyncio.run(world.plane.start())
    return create_rest_app(lambda: world.plane, lambda: b"# metrics\n", MAX_BODY_BYTES, echoes_request_id=True)


@pytest.fixture(scope="module")
def schema(app: HttpApp) -> schemathesis.BaseSchema:
    """The document, restricted to this world's catalogue, time and models."""
    schemas = app.openapi()["components"]["schemas"]
    known = {"categories": ["even", "odd"], "allowed_item_ids": ["i00", "i01", "i19"]}
    for name, values in known.items():
        schemas["FiltersBody"]["properties"][name]["items"] = {"enum": values}
    schemas["SimilarBody"]["properties"]["item_ids"]["items"] = {"enum": known["allowed_item_ids"]}
    schemas["ConditionBody"] = {
        "type": "object",
        "properties": {"key": {"enum": ["categories"]}, "eq": {"enum": known["categories"]}},
        "required": ["key", "eq"],
    }
    for clauses in schemas["ExpressionBody"]["properties"].values():
        clauses["minItems"] = 1
    schemas["CapBody"]["properties"]["attribute"] = {"enum": ["categories"]}
    schemas["PinBody"]["properties"]["item_id"] = {"enum": known["allowed_item_ids"]}
    for path, method, name, values in (
        ("/v1/popular", "get", "category", known["categories"]),
        ("/v1/bundle", "get", "name", ["default"]),
        ("/v1/items/{item_id}/similar", "post", "item_id", known["allowed_item_ids"]),
    ):
        (parameter,) = [
            parameter for parameter in app.openapi()["paths"][path][method]["parameters"] if parameter["name"] == name
        ]
        parameter["schema"] = {"enum": values}
    batch = app.openapi()["paths"]["/v1/recommendations:batch"]["post"]
    batch["parameters"] = [
        parameter for parameter in batch["parameters"] if parameter["name"] != "X-Batch-Size"
    ]  # depends on the body
    now_ms = int(NOW_S * 1_000)
    schemas["EventBody"]["properties"]["event_time_ms"] |= {"minimum": now_ms - 10**9, "maximum": now_ms}
    for schema in schemas.values():  # answers may gain fields later, but have no extra fields now
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
    for body in ("CompletionBody", "ChatBody"):
        schemas[body]["properties"]["model"] = {"enum": [MODEL, "none"]}
    for body in ("RecommendBody", "SimilarBody"):
        schemas[body]["properties"].pop("next")  # a schema cannot know valid tokens
        schemas[body]["properties"].pop("surface")  # this world has no surfaces
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_operation_is_in_the_document(app: HttpApp) -> None:
    """The committed document describes exactly the served operations, and declares their path parameters."""
    paths = app.openapi()["paths"]
    described = {
        f"{method.upper()} {path}": operation
        for path, methods in paths.items()
        for method, operation in methods.items()
    }

    assert sorted(described) == OPERATIONS
    for label, operation in described.items():
        declared = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
        assert declared == {part.strip("{}") for part in label.split("/") if part.startswith("{")}


def test_the_headers_of_a_keys_limits_are_described(app: HttpApp) -> None:
    """Every call that needs a scope documents the headers for successes and for 429."""
    document = app.openapi()
    sent = Standing(
        Allowance(rate_per_s=1.0, burst=1, daily_quota=1), RemainingCalls(1.0, 0), NOW_S, is_shared=True
    ).headers()

    assert {name.lower() for name in document["components"]["headers"]} == set(sent)
    for methods in document["paths"].values():
        for operation in methods.values():
            described = {
                status
                for status, response in operation["responses"].items()
                if "RateLimit-Limit" in response.get("headers", {})
            }
            answers = {status for status in operation["responses"] if status.startswith("2")}
            assert described == ({*answers, "429"} if "security" in operation else set())


MANY = pytest.param(NUM_IN_GRID, marks=pytest.mark.grid)


@pytest.mark.parametrize("num_examples", [NUM_SAMPLED, MANY])
@pytest.mark.parametrize("label", OPERATIONS)
def test_valid_requests_are_answered_as_described(
    schema: schemathesis.BaseSchema, label: str, num_examples: int
) -> None:
    """Valid requests are accepted, and status, content type, headers and body of each answer are in the document."""
    statuses = statuses_of(schema, label, GenerationMode.POSITIVE, num_examples)

    assert statuses
    assert 500 not in statuses


@pytest.mark.parametrize("num_examples", [NUM_SAMPLED, MANY])
@pytest.mark.parametrize("label", [label for label in OPERATIONS if label not in WITHOUT_INPUT])
def test_invalid_requests_are_refused_as_described(
    schema: schemathesis.BaseSchema, label: str, num_examples: int
) -> None:
    """Requests that the document forbids are rejected."""
    statuses = statuses_of(schema, label, GenerationMode.NEGATIVE, num_examples)

    assert statuses
    assert 500 not in statuses


def statuses_of(schema: schemathesis.BaseSchema, label: str, mode: GenerationMode, num_examples: int) -> set[int]:
    """Call an operation with generated requests, check each answer against the document, and return the statuses."""
    statuses: set[int] = set()
    method, path = label.split()
    is_valid, not_checked = mode is GenerationMode.POSITIVE, (*NOT_CHECKED, *(NOT_FOR_TEXT if label in TEXT else ()))
    not_checked += NOT_FOR_ASSIGNMENTS if path.endswith("/assignment") else ()
    not_checked += NOT_FOR_SEARCHES if path.endswith("/search") else ()
    not_checked += NOT_FOR_BATCHES if path.endswith(":batch") else ()
    not_checked += NOT_FOR_ITEMS if label == "PUT /v1/items" else ()

    @hypothesis.given(case=schema[path][method].as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    def call(case: schemathesis.Case) -> None:
        sent = [*(unquote(str(value)) for value in (case.path_parameters or {}).values()), *(case.query or {}).values()]
        hypothesis.assume(all(is_described(value, is_valid) for value in sent if isinstance(value, str)))
        case.body = expressible(case.body) if is_valid else integers(case.body)
        answer = case.call_and_validate(excluded_checks=[CHECKS.get_one(name) for name in not_checked])
        statuses.add(answer.status_code)

    call()
    return statuses


def is_described(text: str, is_valid: bool) -> bool:
    """Return whether the pattern of printable texts classifies the text correctly.

    Schemathesis knows only part of Unicode's classes, and generates control characters in paths.
    """
    return text.isprintable() if is_valid else text.isascii()


def integers(value: Any) -> Any:
    """Write 1.0 as 1: JSON schema calls both an integer, but the doors accept only 1."""
    if isinstance(value, dict):
        return {name: integers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [integers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def expressible(value: Any) -> Any:
    """Remove values that no schema can forbid: unprintable characters, equal event ids, and two pins of one item."""
    if isinstance(value, dict):
        value = {name: part[:1] if name == "pins" and part else part for name, part in value.items()}
        return {name: expressible(part) for name, part in value.items() if name != "event_id" and name.isprintable()}
    if isinstance(value, list):
        return [expressible(part) for part in value]
    if isinstance(value, str):
        return "".join(char if char.isprintable() else "x" for char in value)
    return integers(value)


def test_every_default_fits_its_own_schema() -> None:
    """A caller may send the default that the document states."""
    document = json.loads(PATH.read_text())
    validator = validators.extend(Draft202012Validator, {"pattern": lambda *_: ()})  # Python cannot compile \\p{...}

    def defaults(path: str, node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(node, dict) and "default" in node and {"type", "anyOf", "allOf", "$ref"} & node.keys():
            yield path, node
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            yield from defaults(f"{path}/{key}", inner)

    nodes = dict(defaults("", document))
    wrong = {
        path: node["default"]
        for path, node in nodes.items()
        if not validator({**node, "components": document["components"]}).is_valid(node["default"])
    }
    assert len(nodes) > 30
    assert wrong == {}
