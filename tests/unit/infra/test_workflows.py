"""The workflows: the CI check, and publication to the registry that the fork's variables name."""

import re
import shutil
import subprocess
from pathlib import Path
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


def test_images_and_chart_go_to_the_forks_registry(tmp_path: Path) -> None:
    """The registry comes from a variable, both targets are built, and the chart names the published images."""
    text = (WORKFLOWS / "publish.yml").read_text()
    lines = [
        line for step in steps("publish.yml") for line in step.get("run", "").splitlines() if line.startswith("sed ")
    ]
    shutil.copytree(ROOT / "infra/kubernetes/chart", tmp_path / "infra/kubernetes/chart")
    given = {"REGISTRY": "registry.example.com/shop", "version": "1.2.3", "PATH": "/usr/bin:/bin"}
    for line in lines:
        subprocess.run(line, shell=True, check=True, cwd=tmp_path, env=given)
    values, gpu = (
        yaml.safe_load((tmp_path / f"infra/kubernetes/chart/values{kind}.yaml").read_text()) for kind in ("", "-gpu")
    )

    assert (values["image"]["repository"], values["image"]["tag"]) == ("registry.example.com/shop/tailrace", "1.2.3")
    assert gpu["llm"]["imageTag"] == "1.2.3-gpu"
    assert values["train"] == yaml.safe_load((ROOT / "infra/kubernetes/chart/values.yaml").read_text())["train"]
    assert "${{ vars.REGISTRY }}" in text
    assert set(re.findall(r"target: (\w+)", text)) == {"cpu", "gpu"}
    assert not re.search(r"\b[a-z0-9-]+\.(io|com|dev|pkg)/", re.sub(r"#.*", "", text))
