"""`make gpu-check` at its smallest size on a CPU, so that only device-specific failures remain for a GPU."""

import fcntl
import itertools
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import ARCHIVE, SUMMARY, run_all
from benchmarks.gpu.steps import Step
from tests.support.engine.attention_oracle import CASES, sample
from tests.support.wait import wait_for

ROOT = Path(__file__).resolve().parents[3]


MISSING = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

ALLOWED = {
    "torch", "numpy", "triton", "safetensors", "tokenizers", "pytest", "pytest-xdist", "hypothesis",
    "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "typing-extensions", "setuptools",
    "execnet", "sortedcontainers", "attrs", "pluggy", "iniconfig", "packaging", "pygments", "tailrace",
}

NAMES = {
    module
    for module, distributions in packages_distributions().items()
    if not {name.lower().replace("_", "-") for name in distributions} & ALLOWED
} - {"tests", "benchmarks", "services", "pipelines", "models", "infra"}

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in NAMES else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
"""A `sitecustomize` that hides packages missing on the GPU machine, which has torch, triton, numpy, safetensors,
tokenizers and pytest, with their requirements.
"""


@pytest.mark.grid  # tests/gpu and test_engine_benchmark.py run the parts
@pytest.mark.timeout(1_800)
def test_every_step_runs_and_leaves_its_results(tmp_path: Path) -> None:
    """With only the GPU machine's packages, each step ends well within its time, and eight files hold all results.

    In bf16, every kind of recomputation gives the same loss, and keeps less memory the more it recomputes.
    """
    out, site = tmp_path / "out", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(MISSING)
    variables = (f"PYTHONPATH={site}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "PYTEST_PLUGINS=xdist.plugin")
    command = ["/usr/bin/env", *variables, sys.executable, "-m", "benchmarks.gpu", str(out), "--tiny"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1_700)

    summary = {step["name"]: step for step in json.loads((out / "summary.json").read_text())}
    assert done.returncode == 0, done.stdout + "".join(step["output_tail"] for step in summary.values() if step["code"])
    assert {name: step["code"] for name, step in summary.items()} == dict.fromkeys(NAMES, 0)
    assert len(list(out.iterdir())) == MOST_FILES
    results = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert [row["error"] for row in results["smoke"]["checks"]] == [None] * 5
    assert all(row["is_right"] for row in results["oracle"]["cases"])
    assert len(results["beams"]["groups"][0]["cases"]) == 4
    assert [row["kind"] for row in results["profile"]["attention"]] == ["prefill", "decode", "beam"]
    assert {row["kind"] for row in results["profile"]["steps"]} >= {"texts: prefill", "texts: decode", "ranking: beam"}
    assert all(row["span_us"] > 0 for row in results["profile"]["profiles"].values())
    none, selective, full = results["train"]["rows"]
    assert none["last_loss"] == selective["last_loss"] == full["last_loss"]
    assert all(row["mfu_of_measured"] > 0 and row["memory"]["measured_bytes"] > 0 for row in (none, selective, full))
    kept = [row["memory"]["predicted"]["activations"] for row in (none, selective, full)]
    assert kept == sorted(kept, reverse=True)
    with tarfile.open(out / ARCHIVE) as packed:
        assert {"beams.txt", "ranking.trace.json.gz"} <= set(packed.getnames())


NAMES = ("smoke", "oracle", "tests", "compile", "beams", "text", "profile", "train")
MOST_FILES = 8
"""The files that the GPU machine returns."""


def test_the_oracle_s_sample_covers_every_pair_of_values() -> None:
    """The oracle's sample covers every pair of values; a strided sample would cover only one head size."""
    for number in (2, 36):
        assert {case.head_dim for case in sample(number)} == {64, 128}
    cases = sample(36)
    for first, second in itertools.combinations(("kv_kind", "work", "parts", "heads_per_group", "head_dim"), 2):
        wanted = {(getattr(case, first), getattr(case, second)) for case in CASES}
        assert {(getattr(case, first), getattr(case, second)) for case in cases} == wanted


def script(name: str, text: str, limit_s: int = 30) -> Step:
    return Step(name, "stage", (sys.executable, "-c", text), limit_s)


def test_a_step_at_its_limit_costs_no_other_s_results(tmp_path: Path) -> None:
    """A step's end also ends its child processes, which would hold the card's memory; other steps still run."""
    locked = tmp_path / "locked"
    locked.touch()
    child = (
        f"import fcntl, time; file = open({str(locked)!r}); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    wanted = [
        script("hangs", parent, 5),
        script("beside", "print('done')"),
        Step("after", "next", (sys.executable, "-c", "exit(3)"), 30),
    ]

    run_all(wanted, tmp_path, tmp_path, scale=1)

    rows = {step["name"]: step for step in json.loads((tmp_path / SUMMARY).read_text())}
    assert {name: step["code"] for name, step in rows.items()} == {"hangs": None, "beside": 0, "after": 3}
    assert (rows["hangs"]["output_tail"], rows["beside"]["output_tail"]) == ("held\n", "done\n")
    wait_for(lambda: _can_lock(locked), timeout_s=20.0, what="the end of the step's child")


def _can_lock(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
