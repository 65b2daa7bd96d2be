"""One fit as a run of an MLflow tracking server, over its REST API 2.0: parameters, measurements by step, and outcome.

A thread sends measurements in batches. An unavailable server is logged once and retried periodically while training
continues; pending measurements are sent when it recovers, and lost if it does not before the end. The run's ID is
stored with the fit's checkpoints, so a fit that resumes after a kill continues its run; steps since the checkpoint then
appear twice, with equal values.
"""

import json
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import structlog

log = structlog.get_logger()

EXPERIMENT = "tailrace"
_API, _SAVED = "/api/2.0/mlflow/", "mlflow.json"
_EVERY_S, _AGAIN_S = 5.0, 30.0
_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
"""A server under load takes seconds for its first write; no step waits for it."""
_MAX_METRICS, _MAX_PARAMETERS, _MAX_CHARS = 1_000, 100, 6_000
"""The API's limits on measurements per request and on the length of a parameter's value."""
_MAX_WAITING = 200_000
"""Maximum number of measurements pending for an unavailable server."""
_Unanswered = (httpx.HTTPError, ValueError, KeyError)
"""No answer, a refusal, or an answer that is not MLflow's."""


class MlflowRun:
    """A run of one fit, as a context manager that ends the run. `folder` is the folder of the fit's checkpoints."""

    def __init__(self, uri: str, name: str, parameters: Mapping[str, str], folder: Path) -> None:
        self._uri, self._name, self._parameters, self._saved = uri, name, parameters, folder / _SAVED
        self._client = httpx.Client(base_url=uri.rstrip("/") + _API, timeout=_TIMEOUT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_MAX_WAITING)
        self._sending: Future[None] | None = None
        self._next_s = 0.0
        self._run_id: str | None = None
        self._has_failed = False

    def __enter__(self) -> Self:
        self._send_soon()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        status = "FINISHED" if kind is None else "FAILED" if issubclass(kind, Exception) else "KILLED"
        self.flush(status)
        self._thread.shutdown()
        self._client.close()

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the measurements of one step, to be sent within seconds."""
        now_ms = int(1_000 * time.time())
        for name, value in values.items():
            self._waiting.append({"key": name, "value": value, "timestamp": now_ms, "step": step})
        if time.monotonic() >= self._next_s and (self._sending is None or self._sending.done()):
            self._send_soon()

    def flush(self, status: str | None = None) -> None:
        """Wait until the queue has been sent or sending has failed; `status` ends the run."""
        self._thread.submit(self._send, status).result()

    def _send_soon(self) -> None:
        self._next_s = time.monotonic() + (_AGAIN_S if self._has_failed else _EVERY_S)
        self._sending = self._thread.submit(self._send)

    def _send(self, status: str | None = None) -> None:
        """Send the queue, then the outcome if the fit has ended."""
        try:
            if self._run_id is None:
                self._run_id = self._begin()
            while batch := [self._waiting.popleft() for _ in range(min(_MAX_METRICS, len(self._waiting)))]:
                try:
                    self._post("runs/log-batch", run_id=self._run_id, metrics=batch)
                except _Unanswered:
                    self._waiting.extendleft(reversed(batch))
                    raise
            if status is not None:
                _end(self._client, self._run_id, status)
        except _Unanswered as error:
            if not self._has_failed:
                where = httpx.URL(self._uri).copy_with(userinfo=b"")
                log.warning("mlflow_unavailable", address=str(where), run=self._name, why=repr(error))
            self._has_failed = True

    def _begin(self) -> str:
        """Return the run ID of this fit's previous run, or a new run ID."""
        before = _read(self._saved)
        if before is not None and before["uri"] == self._uri:
            run_id: str = before["run_id"]
            answer = self._client.post("runs/update", json={"run_id": run_id, "status": "RUNNING"})
            if answer.status_code != httpx.codes.NOT_FOUND:
                answer.raise_for_status()
                return run_id
        began_ms = int(1_000 * time.time())
        about = {"experiment_id": self._experiment(), "run_name": self._name, "start_time": began_ms}
        run_id = self._post("runs/create", **about)["run"]["info"]["run_id"]
        named = [{"key": key, "value": value[:_MAX_CHARS]} for key, value in self._parameters.items()]
        for first in range(0, len(named), _MAX_PARAMETERS):
            self._post("runs/log-batch", run_id=run_id, params=named[first : first + _MAX_PARAMETERS])
        self._saved.parent.mkdir(parents=True, exist_ok=True)
        self._saved.write_text(json.dumps({"uri": self._uri, "run_id": run_id}))
        return run_id

    def _experiment(self) -> str:
        response = self._client.get("experiments/get-by-name", params={"experiment_name": EXPERIMENT})
        if response.status_code == httpx.codes.NOT_FOUND:
            return str(self._post("experiments/create", name=EXPERIMENT)["experiment_id"])
        return str(response.raise_for_status().json()["experiment"]["experiment_id"])

    def _post(self, path: str, **content: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.post(path, json=content).raise_for_status().json()
        return answer


def end_left_run(folder: Path, *, is_interrupted: bool) -> None:
    """End the run of a fit whose processes were terminated: as failed, or killed if the user interrupted it."""
    left = _read(folder / _SAVED)
    if left is None:
        return
    try:
        with httpx.Client(base_url=left["uri"].rstrip("/") + _API, timeout=_TIMEOUT) as client:
            _end(client, left["run_id"], "KILLED" if is_interrupted else "FAILED")
    except _Unanswered as error:
        log.warning("mlflow_unavailable", run=left["run_id"], why=repr(error))


def _end(client: httpx.Client, run_id: str, status: str) -> None:
    content = {"run_id": run_id, "status": status, "end_time": int(1_000 * time.time())}
    client.post("runs/update", json=content).raise_for_status()


def _read(path: Path) -> dict[str, str] | None:
    try:
        record: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record
