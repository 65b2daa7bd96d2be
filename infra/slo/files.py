"""Which files are made from the objectives, and what is in them. Writes nothing."""

import json
from pathlib import Path
from typing import Any

import yaml

from infra.slo import alert_tests, operations, page, rules
from infra.slo.dashboards import all_dashboards
from services.observability.objectives import Objectives

RULES = "infra/prometheus/rules"
SLOS_PAGE = "docs/slos.md"
_MADE = "# Made by `make slo` from infra/prometheus/objectives.yaml and infra/slo. Do not edit.\n"


def generated(objectives: Objectives, root: Path) -> dict[str, str]:
    """Return the text of each generated file by its path below `root`, whose hand-written parts are read."""
    slo, operational = rules.groups(objectives), operations.group(objectives.runbooks)
    return {
        f"{RULES}/objectives.yaml": _yaml({"groups": slo}),
        f"{RULES}/operations.yaml": _yaml({"groups": [operational]}),
        **{
            f"infra/prometheus/tests/objectives-{step}.yaml": _yaml(tests)
            for step, tests in alert_tests.files(objectives, "../rules/objectives.yaml").items()
        },
        **{
            f"infra/grafana/dashboards/{name}.json": json.dumps(dashboard, indent=2) + "\n"
            for name, dashboard in all_dashboards(objectives).items()
        },
        SLOS_PAGE: page.with_table((root / SLOS_PAGE).read_text(), objectives),
    }


def _yaml(content: dict[str, Any]) -> str:
    text: str = yaml.dump(content, Dumper=_Plain, sort_keys=False, width=100_000, allow_unicode=True)
    return _MADE + text


class _Plain(yaml.SafeDumper):  # type: ignore[misc]  # yaml comes without types
    """Writes what occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never point back."""
        return True
