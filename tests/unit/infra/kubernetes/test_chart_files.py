"""The chart's generated files are current, and each value has a place, a description and a schema."""

import json

import pytest
import yaml
from jsonschema import Draft7Validator

from infra.chart.files import CHART, generated
from infra.chart.values import Value, ValuePath, load_values
from tests.support.manifests import ROOT, render

WRITTEN_BY_HAND = "Written by hand"


def test_generated_files_are_fresh() -> None:
    """Generated files match the overlays, and every other template is marked as written by hand."""
    made = generated()
    stale = [path for path, text in made.items() if (ROOT / path).read_text() != text]
    others = set((ROOT / CHART / "templates").iterdir()) - {ROOT / path for path in made}

    assert stale == [], "run `make chart`"
    assert [path.name for path in others if path.name != "NOTES.txt" and WRITTEN_BY_HAND not in path.read_text()] == []


def test_a_value_whose_places_differ_is_refused() -> None:
    """A value whose places hold different numbers, or that has no place, is rejected."""
    pods = "*/workerGroupSpecs/*/minReplicas"
    for pattern in (pods, "Deployment/none"):
        value = Value("pods", "", "count", (ValuePath(pattern),), None)
        with pytest.raises(LookupError, match="pods: its fields hold"):
            value.default_in(render("prod"))


def test_every_value_has_a_schema_that_its_default_meets() -> None:
    """The schema is valid JSON Schema draft 7, accepts the defaults and rejects unknown names."""
    schema = json.loads((ROOT / CHART / "values.schema.json").read_text())
    Draft7Validator.check_schema(schema)
    validator = Draft7Validator(schema)
    for name in ("values.yaml", "values-gpu.yaml"):
        assert list(validator.iter_errors(yaml.safe_load((ROOT / CHART / name).read_text()))) == []

    for value in load_values():
        *groups, last = value.name.split(".")
        wrong: object = {f"{last}x": 1}
        for group in reversed(groups):
            wrong = {group: wrong}
        assert not validator.is_valid(wrong), value.name
