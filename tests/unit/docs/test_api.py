"""docs/openapi.json, docs/api.md and README's example answer match the doors."""

import json

import msgspec

from infra.openapi import PATH, document
from services.contracts.message import convert
from services.contracts.recommend import Recommendation
from services.errors import ErrorKind
from services.gateway.call.openapi import ERROR_MEANINGS
from services.gateway.call.operations import STATUS as REST_STATUS
from services.gateway.grpc.answers import STATUS as RPC_STATUS
from tests.support.pages import ROOT, fences


def test_the_committed_document_is_what_the_door_serves() -> None:
    """A newly generated document equals the committed document."""
    assert json.loads(PATH.read_text()) == document(), "docs/openapi.json is stale: run `make docs`"


def test_the_page_lists_every_error_with_its_statuses() -> None:
    """The table has exactly one row per error code, with the document's meaning."""
    errors = (ROOT / "docs/api.md").read_text().partition("## Errors\n")[2]
    rows = [line for line in errors.splitlines() if line.startswith("| `")]

    assert rows == [
        f"| `{kind}` | {REST_STATUS[kind]} | {RPC_STATUS[kind].name} | {ERROR_MEANINGS[kind]} |" for kind in ErrorKind
    ]


def test_the_answer_in_readme_has_the_fields_of_the_schema() -> None:
    """The answer has exactly the required fields, each with its type."""
    (answer,) = (
        json.loads(fence.text) for fence in fences((ROOT / "README.md").read_text()) if fence.language == "json"
    )

    convert(Recommendation, answer)

    required = {field.name for field in msgspec.structs.fields(Recommendation) if field.required}
    assert set(answer) == required
