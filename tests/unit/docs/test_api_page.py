"""docs/api.md and README's answer are the doors'."""

import json

from infra.api_page.page import render
from services.errors import ErrorKind
from services.gateway.call.openapi import ERROR_MEANINGS
from services.gateway.rest.schema import RecommendationBody
from tests.support.pages import ROOT, fences


def test_the_page_is_fresh() -> None:
    """A newly generated page equals the committed one."""
    assert (ROOT / "docs" / "api.md").read_text() == render(ROOT), "docs/api.md is stale: run `make docs`"


def test_the_answer_in_readme_has_the_fields_of_the_schema() -> None:
    """No field is missing, none is unknown, and each has its type."""
    (answer,) = (
        json.loads(fence.text) for fence in fences((ROOT / "README.md").read_text()) if fence.language == "json"
    )

    RecommendationBody.model_validate(answer)

    required = {name for name, field in RecommendationBody.model_fields.items() if field.is_required()}
    assert set(answer) == required


def test_every_error_code_has_its_text() -> None:
    """The page explains each error code."""
    assert set(ERROR_MEANINGS) == set(ErrorKind)
