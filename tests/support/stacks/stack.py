"""A whole stack for tests: started by the operator's command on its own ports, with calls and fault injection."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load.recommender_stub import RecommenderStub
from infra.local.commands.status import inspect_stack
from infra.local.commands.up import spawn_stack
from infra.local.servers.environment import gateway_log
from infra.local.supervisor.ports import free_window, of_running_stack
from infra.local.supervisor.processes import REPLICA, name_of, process_tree
from infra.local.supervisor.stackfile import StackFile
from services.contracts import recommend_pb2 as pb
from services.settings.settings import Settings, inherited_environment
from tests.support.servers import HOST
from tests.support.wait import wait_for

Answer = TypeVar("Answer")
START_TIMEOUT_S = 1_500.0
TEXT_MODEL, TEXT_MAX_TOKENS = "tiny", 3_500
"""The text model of the shared stack, and the maximum length of its texts."""
PORTS = (
    *("http_port", "grpc_port", "metrics_port", "redis_port"),
    *("inner_http_port", "inner_grpc_port", "standby_http_port", "standby_grpc_port"),
)
PORTS_WIDTH = 64
"""As wide as Ray's own port windows, so that no two overlap; the system assigns these ports to no other process."""
AGAIN_WHEN_REFUSED = (
    "grpc.service_config",
    json.dumps(
        {
            "methodConfig": [
                {
                    "name": [{"service": "tailrace.v1.Recommender"}],
                    "retryPolicy": {
                        "maxAttempts": 5,
                        "initialBackoff": "0.1s",
                        "maxBackoff": "1s",
                        "backoffMultiplier": 2,
                        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
                    },
                }
            ]
        }
    ),
)
"""A channel option: calls refused by a gateway on busy cores are retried, as `admitted` does over REST."""
STANDBY_ACTIVE = "tailrace_standby_active"
ROOT = Path(__file__).resolve().parents[3]


class Stack:
    """A stack in one state folder. Its bundle and its features remain after a stop."""

    def __init__(self, state_dir: Path, **settings: Any) -> None:
        first = free_window(PORTS_WIDTH, seed=str(state_dir))
        ports = {name: first + index for index, name in enumerate(PORTS)}
        kafka = f"{HOST}:{first + len(PORTS)}"
        given = {"llm_routing": "always", **ports, **settings}  # a short training shows no gain
        self.settings = Settings(state_dir=state_dir, kafka_bootstrap=kafka, **given)
        self._file = StackFile(state_dir)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None
        self.rest = httpx.Client(base_url=f"http://{HOST}:{self.settings.http_port}", timeout=20.0)
        self.api_key = ""

    def new_key(self, key_id: str, *scopes: str) -> str:
        """Create an API key by the operator's command and return it."""
        options = [word for scope in scopes for word in ("--scope", scope)]
        return self.command("keys", "new", "--id", key_id, *options).stdout.strip()

    def start(self, *options: str) -> None:
        """Run `tailrace up` with these options and wait until it is ready."""
        self._process = spawn_stack(self.settings, ("infra.cli.main", "up", *options))
        wait_for(lambda: self._is_ready() or not self.is_running, START_TIMEOUT_S, "the stack's start")
        if not self._is_ready():
            raise AssertionError(f"`tailrace up` ended:\n{self.output}")
        self._channel = grpc.insecure_channel(self.settings.grpc_address, options=[AGAIN_WHEN_REFUSED])

    def command(self, *arguments: str, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "infra.cli.main", *arguments],
            env={**inherited_environment(), **self.settings.as_environment()},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def stop(self) -> None:
        """Stop it in order, from any state, and close the connections."""
        self.command("down")
        if self._process is not None:
            self.reap()

    def close(self) -> None:
        """Stop, and close the client."""
        self.stop()
        self.rest.close()

    @property
    def output(self) -> str:
        return (self.settings.state_dir / "logs" / "up.log").read_text(errors="replace")

    @property
    def supervisor_pid(self) -> int:
        """The process ID of `tailrace up`."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def reap(self) -> int:
        """Wait for the supervisor's end, close the gRPC connection, and return the exit code."""
        assert self._process is not None
        code = self._process.wait(timeout=60)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        return code

    @property
    def rpc(self) -> Any:
        return RecommenderStub(self.channel)

    @property
    def channel(self) -> grpc.Channel:
        """The gRPC connection."""
        assert self._channel is not None
        return self._channel

    # calls

    def standby(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://{HOST}:{self.settings.standby_http_port}", timeout=20.0)

    def recommend(self, user_id: str | None = None, **fields: Any) -> dict[str, Any]:
        """Request a recommendation over REST. Fails unless the status is 200."""
        response = admitted(lambda: self.rest.post("/v1/recommendations", json={"user_id": user_id, **fields}))
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def known(self, user_id: str, **fields: Any) -> dict[str, Any]:
        """Request a recommendation for a user whose features are read in time."""
        return with_features(lambda: self.recommend(user_id, **fields))

    def listed_user(self) -> str:
        """Find a user who is answered from the stored list."""
        return next(str(number) for number in range(1, 944) if self.known(str(number))["tier"] == "precomputed")

    def click(self, user_id: str, item_id: str, **fields: Any) -> httpx.Response:
        return self.rest.post("/v1/events", json={"user_id": user_id, "item_id": item_id, **fields})

    def until_events_are_accepted(self) -> None:
        """Wait until several clicks in a row are accepted.

        After a broker outage each gateway replaces its client only after a refusal of its own.
        """
        wait_for(
            lambda: all(self.click(new_user_id(), "50").status_code == 200 for _ in range(6)),
            60.0,
            "events accepted again",
        )

    def sees_click(self, user_id: str, item_id: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Record a click, which must be accepted, and return the first answer that reflects it."""
        event_time_ms = int(time.time() * 1_000)
        accepted = admitted(lambda: self.click(user_id, item_id, event_time_ms=event_time_ms))
        assert accepted.status_code == 200, accepted.text
        return self.sees(user_id, event_time_ms, timeout_s)

    def sees(self, user_id: str, event_time_ms: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return the first answer that reflects an event of this time."""

        def fresh() -> dict[str, Any] | None:
            answer = self.recommend(user_id)
            return answer if (answer["newest_event_time_ms"] or 0) >= event_time_ms else None

        answer: dict[str, Any] = wait_for(fresh, timeout_s, f"an answer for {user_id} that has seen the event")
        return answer

    def metric(self, name: str, /, **labels: str) -> float:
        """Sum a metric over all its series with these labels; 0 without any."""
        text = httpx.get(f"http://{HOST}:{self.settings.metrics_port}/metrics", timeout=20.0).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def log_lines(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of gateways and engines with these fields, in the order of writing.

        Every line must be a JSON object.
        """
        lines = (json.loads(line) for line in self._log().splitlines())
        return [line for line in lines if fields.items() <= line.items()]

    def _log(self) -> str:
        return gateway_log(self.settings).read_text()

    # faults

    def pid(self, part: str) -> int:
        """The process of a part, not its keeper; waits while the part is down."""
        return int(wait_for(lambda: self._tree(part), what=f"{part}'s process")[0].pid)

    def num_restarts(self, part: str) -> int:
        """How often the supervisor has restarted a part."""
        record = self._file.read()
        return record.parts[part].num_restarts if record and part in record.parts else 0

    def kill(self, part: str) -> None:
        """SIGKILL a part and wait until the supervisor has restarted it."""
        before = self.num_restarts(part)
        os.kill(self.pid(part), signal.SIGKILL)
        wait_for(lambda: self.num_restarts(part) > before, what=f"a restart of {part}")

    def kill_processes(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    @contextmanager
    def frozen(self, part: str) -> Iterator[None]:
        """Freeze a part for a while: it accepts connections and does not answer."""
        pid = self.pid(part)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def replica_pids(self, is_wanted: Callable[[str], bool]) -> list[int]:
        """The Ray Serve replicas of matching deployments."""
        titles = ((process.pid, name_of(process)) for process in self._tree("serve"))
        return [pid for pid, title in titles if title.startswith(REPLICA) and is_wanted(title.removeprefix(REPLICA))]

    def processes(self) -> list[psutil.Process]:
        """Every process of the stack, including the supervisor."""
        supervisor = psutil.Process(self.supervisor_pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def is_healthy(self) -> bool:
        """Whether all parts are healthy according to `tailrace status`."""
        parts = inspect_stack(of_running_stack(self.settings))
        return bool(parts) and all(part.is_healthy for part in parts)

    def until_healthy(self) -> None:
        """Wait until all parts are healthy and the standby is idle."""
        wait_for(lambda: self.is_healthy() and self.metric(STANDBY_ACTIVE) == 0, 180.0, "a healthy stack")

    def _tree(self, part: str) -> list[psutil.Process]:
        record = self._file.read()
        return process_tree(record.parts.get(part) if record else None)

    def _is_ready(self) -> bool:
        record = self._file.read()
        return record is not None and record.stage == "ready" and record.supervisor_pid == self.supervisor_pid


def survivors(processes: list[psutil.Process]) -> list[str]:
    """Describe which of these processes still run."""
    lines = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                lines.append(f"{process.pid} {process.name()}")
    return lines


def admitted(send: Callable[[], httpx.Response]) -> httpx.Response:
    """Send a request, retrying while a gateway on busy cores refuses it."""

    def taken() -> list[httpx.Response]:
        """Send it once."""
        response = send()
        return [] if response.status_code == 429 else [response]

    response: httpx.Response = wait_for(taken, what="a request that is not refused")[0]
    return response


def with_features(ask: Callable[[], Answer]) -> Answer:
    """Repeat a call, at most twice, while the features come too late.

    A read has 30 ms regardless of the deadline, and busy cores miss that.
    """
    for _ in range(2):
        answer = ask()
        reason = answer.get("reason") if isinstance(answer, dict) else answer.reason
        if reason != "features_unavailable":
            return answer
    return ask()


def new_user_id() -> str:
    return f"visitor-{uuid.uuid4().hex[:12]}"


def rpc_items(answer: pb.RecommendResponse) -> list[str]:
    return [item.item_id for item in answer.items]


def rest_items(answer: dict[str, Any]) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the envelope of a REST error."""
    error: dict[str, Any] = json.loads(response.text)["error"]
    return error
