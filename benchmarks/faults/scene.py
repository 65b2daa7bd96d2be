"""Everything that a fault needs: a stack of its own, behind two proxies if wanted, callers of each priority, its processes.

    callers (REST and gRPC, a key per priority) ──▶ doors ── gateway ──▶ proxy ──▶ store
    event probe ──────────────────────────────────▶           worker ──▶ proxy ──▶ broker

Without a faulty wire there are no proxies: a Python process between the gateways and the store would be the first thing to
run out of breath under load. The stack lives in a scratch folder with a copy of the given state's bundle, features and store, on free ports, and ends with
this. It never touches the given state or a stack that runs from it.
"""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.faults.event_probe import Event
from benchmarks.faults.processes import StackProcesses
from benchmarks.faults.tcp_proxy import Slowness, TcpProxy
from benchmarks.load.audience import Audience, find_audience
from benchmarks.load.clients import Caller, GrpcClient, ProductCaller, RestClient
from benchmarks.load.keys import CallerKeys, write_caller_keys
from benchmarks.load.scoring import tier_weights
from infra.local.commands.down import stop_stack
from infra.local.supervisor.ports import free_window
from infra.local.supervisor.stackfile import StackFile
from models.registry import BundleStore
from services.contracts.access import Priority
from services.errors import EnvironmentFault
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress
from services.settings.settings import Settings, inherited_environment
from tailrace_client import AsyncClient, CallOptions

HOST = "127.0.0.1"
_COPIED = ("bundles", "features", "valkey")
_START_S = 900.0
_STOP_S = 180.0
_USERS_TO_TRY = 120
_SLOW_S = 0.05
_READ_S = 5.0
_NUM_PORTS = 11


class Processes(Protocol):
    """The stack's processes; a fault's step is a method of its own."""

    def is_healthy(self) -> bool:
        """Whether every part is healthy."""
        ...

    def num_restarts(self) -> dict[str, int]:
        """How often each part was started again."""
        ...


@dataclass(frozen=True, slots=True)
class Scene:
    """A running stack with its proxies ("store" and "broker", or none), callers and processes.

    `doors` holds the callers of one priority, one per door: products with their client, and for low priority, whose wave would
    cost the product's client a whole core, the minimal ones. `events` sends once, `batches`, one a door, as often as products do.
    `operator_key` has every scope. `num_events` returns how many events of a user the store has.
    """

    settings: Settings
    wires: dict[str, TcpProxy]
    processes: Processes
    doors: dict[Priority, tuple[Caller, ...]]
    operator_key: str
    events: AsyncClient
    batches: tuple[AsyncClient, ...]
    rest: RestClient
    audience: Audience
    weights: dict[str, float]
    num_events: Callable[[str], Awaitable[int]]
    healthy_within_s: float = 120.0

    async def num_doubled(self, events: Sequence[Event]) -> int:
        """Return how many of these events, each of a user of its own, the store has more than once."""
        return sum([await self.num_events(event.user_id) > 1 for event in events])

    async def until_healthy(self) -> None:
        """Wait until the supervisor holds every part for healthy. Raises EnvironmentFault."""
        give_up_s = time.monotonic() + self.healthy_within_s
        while not (self.processes.is_healthy() and await self._answers_by_llm()):
            if time.monotonic() > give_up_s:
                raise EnvironmentFault("the stack is not healthy again; its logs say why")
            await asyncio.sleep(0.5)

    async def _answers_by_llm(self) -> bool:
        asks = self.audience.asks("llm")
        body = json.dumps({**(asks(0) if asks else {"user_id": "nobody"}), "deadline_ms": 2_000}).encode()
        status, answer = await self.rest.call(b"POST", b"/v1/recommendations", body)
        return status == 200 and json.loads(answer)["tier"] in {"llm", "popular"}


@asynccontextmanager
async def scene_from(state_dir: Path, logs_to: Path | None, *, is_wired: bool, **given: Any) -> AsyncIterator[Scene]:
    """Start a stack with a copy of this state, and stop it at the end, also at SIGTERM; its logs are kept in `logs_to`.

    `is_wired`: store and broker are behind proxies. `given` are settings of this stack. Raises EnvironmentFault, and CancelledError at SIGTERM.
    """
    async with scratch_folder(state_dir, logs_to) as scratch, AsyncExitStack() as closing:
        yield await _set(closing, state_dir, scratch, given, is_wired=is_wired)


@asynccontextmanager
async def scratch_folder(state_dir: Path, logs_to: Path | None) -> AsyncIterator[Path]:
    """Make a stack's folder, and remove it at the end, also at SIGTERM; its logs are kept in `logs_to`.

    Raises EnvironmentFault where `state_dir` has no bundle, and CancelledError at SIGTERM.
    """
    if BundleStore(state_dir / "bundles").live_version() is None:
        raise EnvironmentFault(f"no bundle in {state_dir}; `tailrace pipeline` makes one")
    scratch = Path(tempfile.mkdtemp(prefix="tailrace-chaos-"))
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield scratch
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        if logs_to is not None and (scratch / "logs").is_dir():
            shutil.copytree(scratch / "logs", logs_to, dirs_exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)


async def _set(
    closing: AsyncExitStack, state_dir: Path, scratch: Path, given: dict[str, Any], *, is_wired: bool
) -> Scene:
    copy_state(state_dir, scratch)
    first = free_window(_NUM_PORTS, seed=str(scratch))
    settings = _settings(scratch, first, given)
    outer, inner = {"store": first + 3, "broker": first + 4}, {"store": first + 5, "broker": first + 6}
    wires = {name: TcpProxy(HOST, outer[name], inner[name], Slowness(_SLOW_S)) for name in outer} if is_wired else {}
    for wire in wires.values():
        await closing.enter_async_context(wire)
    ports = inner if is_wired else outer
    command = ("benchmarks.faults.stack", str(ports["store"]), str(ports["broker"]))
    return await started_scene(closing, settings, command, StackProcesses(scratch), wires)


def copy_state(state_dir: Path, scratch: Path) -> None:
    """Copy what a stack starts from."""
    for name in _COPIED:
        if (state_dir / name).is_dir():
            shutil.copytree(state_dir / name, scratch / name)


async def started_scene(
    closing: AsyncExitStack,
    settings: Settings,
    command: tuple[str, ...],
    processes: StackProcesses,
    wires: dict[str, TcpProxy],
) -> Scene:
    """Start the stack that the module `command` runs, with keys of its own, and return it with its callers. Raises EnvironmentFault."""
    assert settings.api_keys_file is not None
    keys = write_caller_keys(settings.api_keys_file)
    child = _spawn(settings, command)
    closing.push_async_callback(asyncio.to_thread, _stop, settings, child)
    await _until_ready(settings, child)
    weights = tier_weights(BundleStore(settings.bundle_root).live().report())
    features = FeatureReader(RepoAddress(settings.feature_repo_dir, settings.redis_address), settings.topic_partitions)
    closing.push_async_callback(features.close)

    async def num_events(user_id: str) -> int:
        return (await features.read(user_id, "", _READ_S)).num_events

    return await called_scene(closing, settings, processes, wires, keys, weights, num_events)


async def called_scene(
    closing: AsyncExitStack,
    settings: Settings,
    processes: Processes,
    wires: dict[str, TcpProxy],
    keys: CallerKeys,
    weights: dict[str, float],
    num_events: Callable[[str], Awaitable[int]],
) -> Scene:
    """Return a running stack, at the doors of these settings, with its callers."""
    doors = {priority: await _callers(closing, settings, priority, key) for priority, key in keys.by_priority.items()}
    once = CallOptions(retry_reserve=0)  # a repeated event would not show when the first of them was accepted again
    host, port, key = settings.http_host, settings.http_port, keys.by_priority[Priority.HIGH]
    over_rest, *_ = addresses = _addresses(settings)
    events = await closing.enter_async_context(AsyncClient(over_rest, api_key=key, options=once))
    batches = [await closing.enter_async_context(AsyncClient(address, api_key=key)) for address in addresses]
    probe = await closing.enter_async_context(RestClient(host, port, key))
    audience = await find_audience(probe, map(str, range(1, _USERS_TO_TRY)))
    return Scene(
        settings, wires, processes, doors, keys.operator, events, tuple(batches), probe, audience, weights, num_events
    )


async def _callers(closing: AsyncExitStack, settings: Settings, priority: Priority, key: str) -> tuple[Caller, ...]:
    """Return the callers of one priority, over REST and over gRPC."""
    if priority is Priority.LOW:
        return (
            await closing.enter_async_context(RestClient(settings.http_host, settings.http_port, key)),
            await closing.enter_async_context(GrpcClient(settings.grpc_address, key)),
        )
    return tuple([await closing.enter_async_context(ProductCaller(address, key)) for address in _addresses(settings)])


def _addresses(settings: Settings) -> tuple[str, str]:
    return f"http://{settings.http_host}:{settings.http_port}", f"grpc://{settings.grpc_address}"


def _settings(scratch: Path, first: int, given: dict[str, Any]) -> Settings:
    """Return settings that share nothing with any other stack but the code."""
    return Settings(
        state_dir=scratch,
        http_port=first,
        grpc_port=first + 1,
        metrics_port=first + 2,
        redis_port=first + 3,
        kafka_bootstrap=f"{HOST}:{first + 4}",
        inner_http_port=first + 7,
        inner_grpc_port=first + 8,
        standby_http_port=first + 9,
        standby_grpc_port=first + 10,
        api_keys_file=scratch / "keys.json",
        llm_routing="always",
        **given,
    )


async def _until_ready(settings: Settings, child: "subprocess.Popen[bytes]") -> None:
    give_up_s = time.monotonic() + _START_S
    while child.poll() is None and time.monotonic() < give_up_s:
        record = StackFile(settings.state_dir).read()
        if record is not None and record.stage == "ready":
            return
        await asyncio.sleep(0.1)
    words = _log_path(settings).read_text(errors="replace")
    raise EnvironmentFault(f"the stack did not start:\n{words[-2_000:]}")


def _stop(settings: Settings, child: "subprocess.Popen[bytes]") -> None:
    """Stop the stack; a supervisor that does not stop is killed, and what it leaves is ended."""
    try:
        stop_stack(settings)
        child.wait(_STOP_S)
    except (EnvironmentFault, subprocess.TimeoutExpired):
        child.kill()
        child.wait()
        stop_stack(settings)


def _log_path(settings: Settings) -> Path:
    return settings.state_dir / "logs" / "up.log"


def _spawn(settings: Settings, command: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    log_path = _log_path(settings)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**inherited_environment(), **settings.as_environment()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
