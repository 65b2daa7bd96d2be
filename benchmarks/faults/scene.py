"""The setting of a fault: a separate stack, optionally behind two proxies, callers of each priority, its processes.

    callers (REST and gRPC, a key per priority) ──▶ doors ── gateway ──▶ proxy ──▶ store
    event probe ──────────────────────────────────▶           worker ──▶ proxy ──▶ broker

Proxies exist only for connection faults: a Python process between the gateways and the store would be the first
bottleneck under load. The stack lives in a scratch folder with a copy of the given state's bundle, features and store,
on free ports, and ends with the scene. It never touches the given state or a stack that runs from it.
"""

import asyncio
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.faults.event_probe import ProbeEvent
from benchmarks.faults.object_store import HostileWriter, put_live, s3_server
from benchmarks.faults.peer import PeerProcess
from benchmarks.faults.processes import StackProcesses
from benchmarks.faults.tcp_proxy import Slowness, TcpProxy
from benchmarks.load.audience import Audience, find_audience
from benchmarks.load.clients import Caller, GrpcClient, ProductCaller, RestClient
from benchmarks.load.keys import write_caller_keys
from benchmarks.load.scoring import tier_weights
from infra.local.commands.down import stop_stack
from infra.local.commands.up import spawn_stack, until_ready
from infra.local.supervisor.ports import free_window
from models.registry.store import BundleStore
from services.contracts.access import Priority
from services.errors import EnvironmentFault
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress
from services.settings.settings import Settings
from tailrace_client import AsyncClient, CallOptions, CatalogueItem

HOST = "127.0.0.1"
_COPIED = ("bundles", "features", "valkey")
_STOP_S = 180.0
_USERS_TO_TRY = 120
_SLOW_S = 0.05
_READ_S = 5.0
_NUM_AGREEING, _LOOK_S = 12, 0.05
"""Consecutive answers of a door without the hidden items: both gateways have given some of them."""
_PEER_ITEMS = 500
_PORTS = (
    *("http_port", "grpc_port", "metrics_port", "redis_port"),
    *("inner_http_port", "inner_grpc_port", "standby_http_port", "standby_grpc_port"),
)


class SceneKind(StrEnum):
    """The kinds of stacks. WIRED: store and broker are behind proxies, and the store asks for a password.

    STORED: bundles are in an object store. SHARDED: two processes share each layer of the ranking model. HANDED:
    another server ranks and writes, behind a proxy.
    """

    DIRECT = "direct"
    WIRED = "wired"
    STORED = "stored"
    SHARDED = "sharded"
    HANDED = "handed"


@dataclass(frozen=True, slots=True)
class Scene:
    """A running stack with its proxies ("store" and "broker", or "peer", or none), callers and processes.

    `doors` holds the callers of one priority, one per door: the product's client, except for low priority, whose spike
    would cost that client a whole core, the minimal callers. `events` sends once; `batches`, one per door, retries as
    products do. `operator_key` has every scope. `features` reads the store. `closing` ends processes that a fault
    starts; `promoted` are the ports of stores that a failover made the primary.
    """

    settings: Settings
    wires: dict[str, TcpProxy]
    processes: StackProcesses
    doors: dict[Priority, tuple[Caller, ...]]
    operator_key: str
    events: AsyncClient
    batches: tuple[AsyncClient, ...]
    rest: RestClient
    audience: Audience
    weights: dict[str, float]
    features: FeatureReader
    closing: AsyncExitStack
    promoted: list[int] = field(default_factory=list)
    healthy_within_s: float = 120.0
    writers: list[HostileWriter] = field(default_factory=list)
    peers: list[PeerProcess] = field(default_factory=list)

    async def num_events(self, user_id: str) -> int:
        """Return the number of a user's events in the store."""
        return (await self.features.read(user_id, "", _READ_S)).num_events

    async def num_doubled(self, events: Sequence[ProbeEvent]) -> int:
        """Return how many of these events, each of a different user, the store has more than once."""
        return sum([await self.num_events(event.user_id) > 1 for event in events])

    async def hide(self, num: int) -> tuple[str, ...]:
        """Hide the first items of the audience; return them once gateways and standby exclude them.

        Raises EnvironmentFault.
        """
        hidden = self.audience.item_ids[:num]
        if not hidden:
            return ()
        address = f"http://{self.settings.http_host}:{self.settings.http_port}"
        async with AsyncClient(address, api_key=self.operator_key) as operator:
            await operator.put_items([CatalogueItem(item_id=item_id, available=False) for item_id in hidden])
        give_up_s = time.monotonic() + self.healthy_within_s
        async with RestClient(self.settings.inner_host, self.settings.standby_http_port, self.operator_key) as standby:
            for door in (self.rest, standby) if self.settings.standby else (self.rest,):
                num_without = 0
                while num_without < _NUM_AGREEING:
                    answer = await door.recommend({"user_id": "nobody"})
                    num_without = num_without + 1 if answer.is_ok and set(hidden).isdisjoint(answer.item_ids) else 0
                    if time.monotonic() > give_up_s:
                        raise EnvironmentFault(f"{door.address} still shows hidden items; the worker's log says why")
                    await asyncio.sleep(_LOOK_S)
        return hidden

    async def until_healthy(self) -> None:
        """Wait until the supervisor considers every part healthy. Raises EnvironmentFault."""
        give_up_s = time.monotonic() + self.healthy_within_s
        while not (self.processes.is_healthy() and await self._answers_by_llm()):
            if time.monotonic() > give_up_s:
                raise EnvironmentFault("the stack is not healthy again; its logs say why")
            await asyncio.sleep(0.5)

    async def _answers_by_llm(self) -> bool:
        asks = self.audience.asks("llm")
        ask = {**(asks(0) if asks else {"user_id": "nobody"}), "deadline_ms": 2_000}
        return (await self.rest.recommend(ask)).tier in {"llm", "popular"}


@asynccontextmanager
async def scene_from(state_dir: Path, logs_to: Path | None, kind: SceneKind, **given: Any) -> AsyncIterator[Scene]:
    """Start a stack with a copy of this state, and stop it at the end, also at SIGTERM; its logs are kept in `logs_to`.

    `given` are settings of this stack. Raises EnvironmentFault, and CancelledError at SIGTERM.
    """
    async with scratch_folder(state_dir, logs_to) as scratch, AsyncExitStack() as closing:
        first = free_window(len(_PORTS) + 3, seed=str(scratch))
        ports: dict[str, Any] = {name: first + index for index, name in enumerate(_PORTS)}
        if kind is SceneKind.SHARDED:
            given["llm_tensor_parallel_size"] = 2
        if kind is SceneKind.STORED:
            given["cache_dir"] = scratch / "cache"
            given["bundle_store"] = closing.enter_context(s3_server(scratch / "s3"))
        kafka_port, *behind = range(first + len(_PORTS), first + len(_PORTS) + 3)
        if kind is SceneKind.WIRED:
            (scratch / "store.password").write_text("first")
            given["redis_password_file"] = scratch / "store.password"
        if kind is SceneKind.HANDED:
            given |= dict.fromkeys(("llm_url", "text_url"), f"http://{HOST}:{behind[0]}/v1")
        settings = Settings(  # it shares only code with other stacks
            state_dir=scratch,
            kafka_bootstrap=f"{HOST}:{kafka_port}",
            api_keys_file=scratch / "keys.json",
            llm_routing="always",
            **ports,
            **given,
        )
        if kind is SceneKind.STORED:
            await asyncio.to_thread(put_live, settings, BundleStore(scratch / "bundles").live())
        outer = {"store": settings.redis_port, "broker": kafka_port}
        inner = dict(zip(outer, behind, strict=True)) if kind is SceneKind.WIRED else outer
        wired = outer if kind is SceneKind.WIRED else {}
        wires = {name: TcpProxy(HOST, outer[name], inner[name], Slowness(_SLOW_S)) for name in wired}
        for wire in wires.values():
            await closing.enter_async_context(wire)
        peers = []
        if kind is SceneKind.HANDED:
            peers = [await _start_peer(closing, settings, behind[0], behind[1], wires)]
        command = ("benchmarks.faults.stack", *map(str, inner.values()))
        scene = await started_scene(closing, settings, command, StackProcesses(scratch), wires)
        yield replace(scene, peers=peers)


async def _start_peer(
    closing: AsyncExitStack, settings: Settings, port: int, own_port: int, wires: dict[str, TcpProxy]
) -> PeerProcess:
    """Start the server that ranks the live bundle's items, and the proxy "peer" in front of it."""
    item_ids = BundleStore.of(settings).live().catalogue().item_ids[:_PEER_ITEMS]
    peer = PeerProcess(own_port, item_ids)
    closing.callback(peer.kill)
    await asyncio.to_thread(peer.start)
    wires["peer"] = TcpProxy(HOST, port, own_port, Slowness(_SLOW_S))
    await closing.enter_async_context(wires["peer"])
    return peer


@asynccontextmanager
async def scratch_folder(state_dir: Path, logs_to: Path | None) -> AsyncIterator[Path]:
    """Copy a stack's initial state to a separate folder, and remove that at the end, also at SIGTERM.

    Logs are kept in `logs_to`. Raises EnvironmentFault if `state_dir` has no bundle, and CancelledError at SIGTERM.
    """
    if BundleStore(state_dir / "bundles").live_version() is None:
        raise EnvironmentFault(f"no bundle in {state_dir}; `tailrace pipeline` makes one")
    scratch = Path(tempfile.mkdtemp(prefix="tailrace-chaos-"))
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        for name in _COPIED:
            if (state_dir / name).is_dir():
                shutil.copytree(state_dir / name, scratch / name)
        yield scratch
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        if logs_to is not None and (scratch / "logs").is_dir():
            shutil.copytree(scratch / "logs", logs_to, dirs_exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)


async def started_scene(
    closing: AsyncExitStack,
    settings: Settings,
    command: tuple[str, ...],
    processes: StackProcesses,
    wires: dict[str, TcpProxy],
) -> Scene:
    """Start the stack of the module `command` with new keys; return it with its callers. Raises EnvironmentFault."""
    assert settings.api_keys_file is not None
    keys = write_caller_keys(settings.api_keys_file)
    child, output = spawn_stack(settings, command), StringIO()
    closing.push_async_callback(asyncio.to_thread, _stop, settings, child)
    try:
        await asyncio.to_thread(until_ready, settings, child, output)
    except EnvironmentFault as error:
        raise EnvironmentFault(f"the stack did not start:\n{output.getvalue()[-2_000:]}") from error
    features = FeatureReader(RepoAddress(settings.feature_repo_dir, settings.redis_address), settings.topic_partitions)
    closing.push_async_callback(features.close)
    key, rest, rpc = keys.by_priority[Priority.HIGH], (settings.http_host, settings.http_port), settings.grpc_address
    addresses = f"http://{settings.http_host}:{settings.http_port}", f"grpc://{rpc}"
    doors: dict[Priority, tuple[Caller, ...]] = {}
    for priority, own in keys.by_priority.items():
        callers: tuple[Caller, ...] = (RestClient(*rest, own), GrpcClient(rpc, own))
        if priority is not Priority.LOW:
            callers = tuple(ProductCaller(address, own) for address in addresses)
        doors[priority] = tuple([await closing.enter_async_context(caller) for caller in callers])
    once = CallOptions(retry_reserve=0)  # a retried event would hide when events were accepted again
    probe = await closing.enter_async_context(RestClient(*rest, key))
    return Scene(
        settings=settings,
        wires=wires,
        processes=processes,
        doors=doors,
        operator_key=keys.operator,
        events=await closing.enter_async_context(AsyncClient(addresses[0], api_key=key, options=once)),
        batches=tuple([await closing.enter_async_context(AsyncClient(address, api_key=key)) for address in addresses]),
        rest=probe,
        audience=await find_audience(probe, map(str, range(1, _USERS_TO_TRY))),
        weights=tier_weights(BundleStore.of(settings).live().report()),
        features=features,
        closing=closing,
    )


def _stop(settings: Settings, child: "subprocess.Popen[bytes]") -> None:
    """Stop the stack; a supervisor that does not stop is killed, and its leftovers are ended."""
    try:
        stop_stack(settings)
        child.wait(_STOP_S)
    except (EnvironmentFault, subprocess.TimeoutExpired):
        child.kill()
        child.wait()
        stop_stack(settings)
