"""The engine's benchmark as a command: processes, rounds, file and tables."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine.cases import Case
from benchmarks.engine.comparison import Comparison
from benchmarks.engine.process import EngineFailed, EngineProcess, Entry, our_entry
from benchmarks.engine.shapes import random_decoder
from models.decoder.weights import save_decoder

ROOT = Path(__file__).resolve().parents[3]


def benchmark(out: Path, *options: str) -> dict[str, Any]:
    """Run the command and read its file."""
    words = f"-m benchmarks.engine --rounds 1 --threads 1 --json {out}".split()
    done = subprocess.run(
        [sys.executable, *words, *options], cwd=ROOT, check=True, timeout=280, stdout=subprocess.PIPE, text=True
    )
    report: dict[str, Any] = json.loads(out.read_text())
    assert all(case["name"] in done.stdout for case in report["cases"])
    return report


@pytest.mark.grid
def test_beside_transformers(tmp_path: Path) -> None:
    """With equal weights and prompts there is a ratio, the items agree, and greedy tokens are near fp32's choice."""
    save_decoder(random_decoder("tiny", torch.float32, torch.device("cpu")), tmp_path / "model")

    words = f"--model {tmp_path / 'model'} --peers transformers --case decode-8 beams-8".split()
    report = benchmark(tmp_path / "out.json", *words)

    ours = {case["name"]: case for case in report["cases"] if case["engine"] == "tailrace"}
    assert all(case["ratio_to_best_peer"] > 0 for case in ours.values())
    assert report["quality"]["tailrace"]["logits_max_error"] < 1e-4
    assert report["quality"]["tailrace"]["largest_gap"] < 0.1
    shares = {row["case"]: row["share"] for row in report["agreement"] if row["engine"] == "tailrace"}
    assert shares["beams-8"] >= 0.5


def test_an_engine_that_does_not_start_costs_no_other_results(tmp_path: Path) -> None:
    """A failed engine is in the file with its last line of output; the other engines are measured."""
    save_decoder(random_decoder("tiny", torch.float32, torch.device("cpu")), tmp_path / "model")
    case = Case(name="rank", unit="ms", batch=1, prompt_len=8, width=4)
    broken = Entry(Path(sys.executable), "benchmarks.engine.tailrace", {"threads": 1}, {})
    comparison = Comparison("cpu", threads=1, rounds=1)
    comparison.run({"broken": broken, "tailrace": our_entry(f"{tmp_path / 'model'}", "cpu", 1, {})}, [case], range(256))

    assert list(comparison.failed) == ["broken"]
    assert comparison.failed["broken"].endswith("KeyError: 'device'\n")
    assert [(measurement.engine, measurement.error) for measurement in comparison.measured] == [("tailrace", None)]


def test_a_late_reply_is_not_taken_for_the_next(tmp_path: Path) -> None:
    """A process that does not answer in time is ended, and the next request fails."""
    module = tmp_path / "slow_engine.py"
    module.write_text(
        "import sys, time\nprint('{}', flush=True)\nfor line in sys.stdin: time.sleep(1); print('{}', flush=True)"
    )
    engine = EngineProcess(Entry(Path(sys.executable), "slow_engine", {}, {"PYTHONPATH": str(tmp_path)}), answer_s=0.1)
    engine.wait_until_ready()
    with pytest.raises(EngineFailed, match="no answer"):
        engine.ask({})

    with pytest.raises(EngineFailed, match="ended with -9"):
        engine.ask({})

    engine.stop()
