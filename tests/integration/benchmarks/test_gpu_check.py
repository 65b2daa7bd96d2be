"""`make gpu-check` at its smallest, on a CPU: what runs first on a card fails there for reasons of the card alone."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine.cases import PRODUCT, shape_cases
from benchmarks.gpu.__main__ import Step, run, steps
from services.llm.ranking.deployment import engine_config
from services.settings.settings import Settings
from tests.support.wait import wait_for

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.grid  # tests/gpu and test_engine_benchmark.py run the parts
@pytest.mark.timeout(1_800)
def test_every_step_runs_and_leaves_its_results(tmp_path: Path) -> None:
    """Oracle, benchmark at both settings, training and profile end well and write their figures into one folder."""
    command = [sys.executable, "-m", "benchmarks.gpu", str(tmp_path), "--tiny"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1_700)

    assert done.returncode == 0, done.stdout + "".join(path.read_text()[-600:] for path in tmp_path.glob("*.txt"))
    summary = {one["name"]: one["code"] for one in json.loads((tmp_path / "summary.json").read_text())}
    assert summary == dict.fromkeys(("machine", "oracle", "engine-benchmark", "engine-product", "train", "profile"), 0)
    oracle = (tmp_path / "oracle.txt").read_text().splitlines()
    assert [line.split()[0] for line in oracle] == ["ok"] * 2
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert [row["kind"] for row in profile["attention"]] == ["prefill", "decode", "beam"]
    assert all(row["gb_per_s"] > 0 and row["tflop_per_s"] > 0 and row["torch_us"] > 0 for row in profile["attention"])
    assert {name for name, row in profile["profiles"].items() if row["span_us"] > 0} == {"texts", "ranking"}
    assert {row["kind"] for row in profile["steps"]} >= {"texts: prefill", "texts: decode", "ranking: beam"}


def test_it_takes_at_most_25_minutes(tmp_path: Path) -> None:
    """The limits of the steps on a card add up to that, the card's tests with pytest included."""
    planned = list(steps(tmp_path, tiny=False))

    assert sum(step.limit_s for step in planned) <= 25 * 60
    assert {"oracle", "tests", "kernel-tests", "engine-benchmark", "engine-product", "train", "profile"} < {
        step.name for step in planned
    }


def test_a_training_is_measured_beside_the_planner(tmp_path: Path) -> None:
    """In bf16 with each kind of recomputation: the same loss, MFU of what the device was measured to do, and memory by component, of which less is kept the more is computed again."""
    (step,) = [step for step in steps(tmp_path, tiny=True) if step.name == "train"]

    ended = run(step, tmp_path, interpreted=True)

    assert ended.code == 0, (tmp_path / "train.txt").read_text()
    none, selective, full = json.loads((tmp_path / "train.json").read_text())["rows"]
    assert none["last_loss"] == selective["last_loss"] == full["last_loss"]
    assert all(row["mfu_of_measured"] > 0 and row["memory"]["measured_bytes"] > 0 for row in (none, selective, full))
    kept = [row["memory"]["predicted"]["activations"] for row in (none, selective, full)]
    assert kept == sorted(kept, reverse=True)


def test_a_step_at_its_limit_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """The engine benchmark's engines are processes of their own: one that hangs must not keep the card's memory from the next step."""
    locked = tmp_path / "locked"
    locked.touch()
    child = f"import fcntl, time; file = open({str(locked)!r}); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"

    ended = run(Step("hangs", (sys.executable, "-c", parent), 8), tmp_path, interpreted=False)

    assert ended.code is None
    assert (tmp_path / "hangs.txt").read_text() == "held\n"
    wait_for(lambda: _can_lock(locked), timeout_s=20.0, what="the end of the step's child")


def _can_lock(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_the_kernels_tests_pass_with_the_card_s_configuration(tmp_path: Path) -> None:
    """It loads no conftest.py, so no profile of hypothesis: an example that compiles a kernel takes longer than its default deadline."""
    command = next(step.command for step in steps(tmp_path, tiny=False) if step.name == "kernel-tests")

    done = subprocess.run(
        ["/usr/bin/env", "TRITON_INTERPRET=1", *command, "-k", "test_norms"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout


def test_the_product_s_settings_are_measured() -> None:
    """What the overlay for cards sets is what the second run of the benchmark has."""
    lines = (ROOT / "infra/kubernetes/overlays/gpu/settings.env").read_text().splitlines()
    served = engine_config(
        Settings(**{key.removeprefix("TAILRACE_").lower(): value for key, value in (line.split("=") for line in lines)})
    )

    assert {name: getattr(served, name) for name in PRODUCT} == PRODUCT
    assert all(PRODUCT.items() <= group.config.items() for group in shape_cases(as_product=True))


def test_the_card_s_tests_run_without_pytest(tmp_path: Path) -> None:
    """On a bare image the plain runner calls every case, with what its fixture sets up, and fails with the test that fails."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "pytestmark = [pytest.mark.gpu, pytest.mark.skipif(False, reason='no card')]\n"
        "made = []\n"
        "@pytest.fixture(autouse=True)\n"
        "def _made(): made.append(1)\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "@pytest.mark.parametrize(('y', 'z'), [(3, 4), (5, 6)])\n"
        "def test_sums(x, y, z): assert made and x + y + z == pytest.approx(8.0, abs=4.0) or z == 6\n"
        "def test_fails(): raise ValueError('why')\n"
    )
    command = [sys.executable, "-m", "tests.support.engine.plain_runner", str(tmp_path / "test_it.py")]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)

    lines = [line for line in done.stdout.splitlines() if line.startswith(("passed", "FAILED"))]
    assert done.returncode == 1
    assert [line.split()[:2] for line in lines] == [["FAILED", "test_fails"]] + [["passed", "test_sums"]] * 4
    assert "ValueError: why" in done.stdout
