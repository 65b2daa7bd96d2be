"""Fits reported to a real MLflow server, read back over its REST API.

Skipped if the command `mlflow` is not installed, for example by `uv tool install mlflow`.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from pipelines.codes.tokenize import tokenize
from pipelines.runner.stage import silent
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.options import Reporting
from pipelines.training.reports.mlflow import EXPERIMENT, MlflowRun
from pipelines.training.train_decoder import read_training, train
from pipelines.training.workers.team import Team
from services.errors import StageFailed
from tests.support.servers import free_port
from tests.support.training.synthetic import histories_from, write_ingested
from tests.unit.pipelines.conftest import CPU, DEPTH_1, DROPPED_DECODER

_START_S = 120


class Server:
    """An MLflow tracking server in a separate process, with persistent data."""

    def __init__(self, folder: Path) -> None:
        self._port, self._folder = free_port(), folder
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Wait until the server answers."""
        store = ("--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db", "--workers", "1")
        words = ("server", "--port", str(self._port), *store, "--artifacts-destination", str(self._folder))
        command = shutil.which("mlflow")
        assert command is not None
        with (self._folder / "server.txt").open("ab") as output:
            self._process = subprocess.Popen((command, *words), stdout=output, stderr=output, process_group=0)
        ends_s = time.monotonic() + _START_S
        while not self._answers():
            assert time.monotonic() < ends_s, (self._folder / "server.txt").read_text()
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.uri}/health", timeout=1.0).is_success
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def runs(self) -> list[dict[str, Any]]:
        """Return all runs of our experiment, oldest first."""
        api = f"{self.uri}/api/2.0/mlflow"
        response = httpx.get(f"{api}/experiments/get-by-name", params={"experiment_name": EXPERIMENT}).json()
        searched = {"experiment_ids": [response["experiment"]["experiment_id"]], "order_by": ["start_time ASC"]}
        runs: list[dict[str, Any]] = httpx.post(f"{api}/runs/search", json=searched).json()["runs"]
        return runs

    def history(self, run: dict[str, Any], name: str) -> list[tuple[int, float]]:
        """Return all values of a run's metric, by step."""
        asked = {"run_id": run["info"]["run_id"], "metric_key": name, "max_results": 25_000}
        points = httpx.get(f"{self.uri}/api/2.0/mlflow/metrics/get-history", params=asked).json()["metrics"]
        return sorted((int(point["step"]), point["value"]) for point in points)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests; each test uses its own run names."""
    if shutil.which("mlflow") is None:
        pytest.skip(
            "no command `mlflow`: its server is too large for the lock; install it apart, for example by `uv tool "
            "install mlflow`"
        )
    running = Server(tmp_path_factory.mktemp("mlflow"))
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of the ring, in `tokens`."""
    folder = tmp_path_factory.mktemp("data")
    ingested = write_ingested(folder / "ingest")
    (folder / "tokens").mkdir()
    tokenize(ingested, histories_from(ingested), 1_000, folder / "tokens", DEPTH_1)
    return folder


def named(server: Server, name: str) -> dict[str, Any]:
    """Return the only run of this name."""
    (run,) = [run for run in server.runs() if run["info"]["run_name"] == name]
    return run


def test_a_training_is_a_run_with_its_parameters_losses_and_end(server: Server, data: Path, tmp_path: Path) -> None:
    """With two ranks, rank 0 reports every step's loss as in training.json, the validations, and the options."""
    reporting = Reporting(run="train-whole", mlflow_uri=server.uri)
    saved = Checkpoints(tmp_path / "saved", "train", 60, reporting)
    train(data / "tokens", DROPPED_DECODER, tmp_path, saved, CPU, silent, team=Team(workers=2, timeout_s=60))

    run, trained = named(server, "train-whole"), read_training(tmp_path)
    assert run["info"]["status"] == "FINISHED"
    assert [loss for _, loss in server.history(run, "loss")] == pytest.approx(trained["losses"]["means"])
    assert server.history(run, "validation") == [(point["step"], point["validation"]) for point in trained["curve"]]
    parameters = {parameter["key"]: parameter["value"] for parameter in run["data"]["params"]}
    assert parameters["fit.descent.learning_rate"] == str(DROPPED_DECODER.fit.descent.learning_rate)
    assert (parameters["hidden_size"], parameters["workers"]) == (str(DROPPED_DECODER.hidden_size), "2")


def test_a_fit_that_fails_ends_its_run_as_failed_and_goes_on_in_it(server: Server, tmp_path: Path) -> None:
    """Earlier measurements are kept; the next attempt of the same fit continues the same run."""
    with suppress(StageFailed), MlflowRun(server.uri, "train-broken", {"seed": "1"}, tmp_path) as run:
        run.measured(1, {"loss": 2.0})
        raise StageFailed("train", "a batch is unusable")
    assert named(server, "train-broken")["info"]["status"] == "FAILED"

    with MlflowRun(server.uri, "train-broken", {"seed": "1"}, tmp_path) as run:
        run.measured(2, {"loss": 1.0})

    recorded = named(server, "train-broken")
    assert recorded["info"]["status"] == "FINISHED"
    assert server.history(recorded, "loss") == [(1, 2.0), (2, 1.0)]


def test_ranks_that_are_killed_leave_no_run_that_goes_on_for_ever(server: Server, data: Path, tmp_path: Path) -> None:
    """If the user interrupts, rank 0 is ended before it can report, and the run is marked killed all the same."""
    saved = Checkpoints(tmp_path / "saved", "train", 0, Reporting(run="train-stopped", mlflow_uri=server.uri))

    def interrupt(_done: int, _total: int, _words: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(data / "tokens", DROPPED_DECODER, tmp_path, saved, CPU, interrupt, team=Team(workers=2, timeout_s=60))

    assert named(server, "train-stopped")["info"]["status"] == "KILLED"


def test_more_measurements_and_parameters_than_one_request_takes_arrive_whole(server: Server, tmp_path: Path) -> None:
    """2,500 measurements and 150 parameters arrive; the longest parameters are truncated."""
    parameters = {f"option{number}": "x" * 10_000 if number == 0 else "y" for number in range(150)}
    with MlflowRun(server.uri, "train-many", parameters, tmp_path) as run:
        for step in range(2_500):
            run.measured(step, {"loss": 1.0 * step})

    recorded = named(server, "train-many")
    assert server.history(recorded, "loss") == [(step, 1.0 * step) for step in range(2_500)]
    assert len(recorded["data"]["params"]) == 150


def test_a_server_that_goes_away_and_comes_back_is_named_once_and_misses_nothing(
    server: Server, tmp_path: Path
) -> None:
    """Training continues during a server outage; the measurements are sent when the server is back."""
    with capture_logs() as logged, MlflowRun(server.uri, "train-away", {}, tmp_path) as run:
        run.measured(1, {"loss": 1.0})
        run.flush()
        server.stop()
        for step in (2, 3):
            run.measured(step, {"loss": 1.0 * step})
            run.flush()
        server.start()
        run.measured(4, {"loss": 4.0})

    assert [line["event"] for line in logged] == ["mlflow_unavailable"]
    assert server.history(named(server, "train-away"), "loss") == [(step, 1.0 * step) for step in (1, 2, 3, 4)]
