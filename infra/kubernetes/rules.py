"""Wraps Prometheus' rule files as one PrometheusRule: `python -m infra.kubernetes.rules`.

Kustomize cannot put a file into a custom resource's list, so the result is a separate file; a test compares the two.
"""

from pathlib import Path
from typing import Any

import yaml

_INFRA = Path(__file__).resolve().parents[1]
RULES = _INFRA / "prometheus/rules"
TARGET = _INFRA / "kubernetes/base/prometheusrule.yaml"

_HEAD = "# Made by `python -m infra.kubernetes.rules` from infra/prometheus/rules; do not edit.\n"


def prometheus_rule(rules: Path) -> dict[str, Any]:
    """Return the PrometheusRule with the groups of all rule files in the folder, in the files' order by name."""
    groups = [group for path in sorted(rules.glob("*.y*ml")) for group in yaml.safe_load(path.read_text())["groups"]]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tailrace", "labels": {"app.kubernetes.io/name": "tailrace"}},
        "spec": {"groups": groups},
    }


def render(rules: Path) -> str:
    """Return the manifest's text."""
    text: str = yaml.safe_dump(prometheus_rule(rules), sort_keys=False, width=150, allow_unicode=True)
    return _HEAD + text


def main() -> None:
    """Write the manifest."""
    TARGET.write_text(render(RULES))


if __name__ == "__main__":
    main()
