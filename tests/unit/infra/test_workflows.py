"""The workflows: the CI check, and publication to the registry that the fork's variables name."""

from typing import Any

import yaml

from tests.support.pages import ROOT

WORKFLOWS = ROOT / ".github/workflows"


def steps(name: str) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    jobs = yaml.safe_load((WORKFLOWS / name).read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_the_check_of_a_merge_is_the_repositorys_own() -> None:
    """CI runs only .ci/run, like any other machine."""
    assert [step["run"] for step in steps("ci.yml") if "run" in step] == [".ci/run"]
