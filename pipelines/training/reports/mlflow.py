"""One fit as a run of an MLflow tracking server, over its REST API 2.0: parameters, measurements by step, and how it ended.

Measurements are sent by a thread, in batches. A server that does not answer is named once in the log and tried again now and then, while training goes
on; what it has missed is sent when it is back, and lost if it is not until the end. The run's id lies beside the fit's checkpoints, so a fit that
goes on after a kill goes on in the same run; steps since the checkpoint are then in it twice, with equal values.
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
"""What the API takes in one request, and in one parameter's value."""
_MAX_WAITING = 200_000
"""Measurements that wait for a server which does not answer."""
_Unanswered = (httpx.HTTPError, ValueError, KeyError)
"""No answer, a refusal, or one that is not MLflow's."""


class MlflowRun:
    """A run of one fit. A context manager, whose end is the run's. `folder` is that of the fit's checkpoints."""

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
        """Take one step's, to be sent within some seconds."""
        now_ms = int(1_000 * time.time())
        for name, value in values.items():
            self._waiting.append({"key": name, "value": value, "timestamp": now_ms, "step": step})
        if time.monotonic() >= self._next_s and (self._sending is None or self._sending.done()):
            self._send_soon()

    def flush(self, status: str | None = None) -> None:
        """Return when what waits has been sent, or could not be; `status` ends the run."""
        self._thread.submit(self._send, status).result()

    def _send_soon(self) -> None:
        self._next_s = time.monotonic() + (_AGAIN_S if self._has_failed else _EVERY_S)
        self._sending = self._thread.submit(self._send)

    def _send(self, status: str | None = None) -> None:
        """Send what waits, then how the fit ended if it has."""
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
        """Return the id of the run that this fit had before, else of a new one."""
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
        found = self._client.get("experiments/get-by-name", params={"experiment_name": EXPERIMENT})
        if found.status_code == httpx.codes.NOT_FOUND:
            return str(self._post("experiments/create", name=EXPERIMENT)["experiment_id"])
        return str(found.raise_for_status().json()["experiment"]["experiment_id"])

    def _post(self, path: str, **content: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.post(path, json=content).raise_for_status().json()
        return answer


def end_left_run(folder: Path, *, is_interrupted: bool) -> None:
    """End the run of a fit whose processes were ended before they could: as failed, or killed where the user interrupted it."""
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
        found: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found
