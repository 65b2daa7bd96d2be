"""The deletion of a tenant on a whole stack, judged by a scan of every store for the tenant's ids.

The stack has the bundle, features and store of this settings' state, bundles in an object store, and two tenants, of
which one has an id that ends with the other's. Both do all that leaves data, through the public doors. The ids of a
tenant's users, sessions and items share a random text, so that no other data looks like them. Places that only name the
tenant, its key or a request are counted apart: logs, metrics and the operator's files.
"""

import asyncio
import csv
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from benchmarks.faults.object_store import put_live
from benchmarks.load.clients import GrpcClient, RestClient
from benchmarks.load.own_stack import stack_for
from benchmarks.many.scan import AUDIT, EVERYWHERE, TOPIC, in_folders, name_sought, prefix_sought, scan, text_sought
from infra.kafka.sender import topic_sender
from infra.local.supervisor.ports import INNER_PORTS, LOOPBACK, PUBLIC_PORTS, free_window
from models.registry.store import BundleStore
from services.contracts.tenant import scoped, scoped_name, scoped_surface
from services.errors import EnvironmentFault
from services.settings.settings import Settings, inherited_environment, load_settings

DELETED, OTHER = "acme", "eu-acme"
_COPIED = ("features", "valkey")
_FILLED = frozenset({"redis", "valkey", "log", "items", "pipeline", f"{TOPIC}interactions", f"{TOPIC}impressions"})
"""Kinds that hold ids of both tenants before the deletion; otherwise their absence afterwards would prove nothing."""
_FILL_S, _DELETE_S, _LOOK_S = 120.0, 240.0, 2.0
_MEMORY_GIB, _DEADLINE_MS, _NUM_USERS, _NUM_REQUESTS = 2.0, 4_000, 3, 20
_NUM_TRAINED_ITEMS, _NUM_TRAINED_EVENTS = 20, 100
_TRAINED_ITEMS = ("50", "181", "174")
"""Items of ml-100k."""
Places = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class _Tenant:
    """A tenant, the texts in the ids of its data and of its requests, and its key."""

    id: str
    mark: str
    request_mark: str
    key: str

    @property
    def user_ids(self) -> list[str]:
        return [f"u{number}-{self.mark}" for number in range(_NUM_USERS)]

    @property
    def item_id(self) -> str:
        return f"i-{self.mark}"

    @property
    def key_id(self) -> str:
        return f"{self.id}-key"


async def measure_deletion(url: str, folder: Path) -> AsyncIterator[dict[str, Any]]:
    """Yield the row of a deletion, on a stack with bundles at this URL and its state in this folder."""
    settings = _settings(url, folder)
    put_live(settings, BundleStore(load_settings().bundle_root).live())
    version = BundleStore.of(settings).live_version()
    assert version is not None
    for tenant in (DELETED, OTHER):
        BundleStore.of(settings, scoped_name(tenant, "default")).promote(version)
    deleted, other = (_new_tenant(settings, tenant) for tenant in (DELETED, OTHER))
    with stack_for(settings, is_started=True):
        row = await _row(settings, deleted, other)
    left = scan(settings, {DELETED: _ids(deleted)}, [in_folders])[DELETED]
    yield row | {"after_the_stop": _counts(left)}


def _settings(url: str, folder: Path) -> Settings:
    state_dir = folder / "state"
    state_dir.mkdir(parents=True)
    for name in _COPIED:
        shutil.copytree(load_settings().state_dir / name, state_dir / name)
    names = ",".join(["default", *(scoped_name(tenant, "default") for tenant in (DELETED, OTHER))])
    surfaces = (f'["{scoped_surface(tenant, "home")}"]\nk = 5\n' for tenant in (DELETED, OTHER))
    (state_dir / "surfaces.toml").write_text("".join(surfaces))
    wanted = (*PUBLIC_PORTS, *INNER_PORTS)
    first = free_window(len(wanted), seed=str(folder))
    ports: dict[str, Any] = {name: first + index for index, name in enumerate(wanted)}
    ports["kafka_bootstrap"] = f"{LOOPBACK}:{ports['kafka_bootstrap']}"
    return Settings(
        state_dir=state_dir,
        cache_dir=state_dir / "cache",
        bundle_store=url,
        names=names,
        llm_memory_gib=_MEMORY_GIB,
        api_keys_file=state_dir / "keys.json",
        tenants_file=state_dir / "tenants.json",
        surfaces_file=state_dir / "surfaces.toml",
        **ports,
    )


def _new_tenant(settings: Settings, tenant: str) -> _Tenant:
    _tailrace(settings, "tenants", "new", tenant, "--daily-quota", "1000000")
    options = ("--tenant", tenant, "--daily-quota", "1000000", *_scopes("recommend", "events", "items", "erase"))
    key = _tailrace(settings, "keys", "new", "--id", f"{tenant}-key", *options).strip()
    return _Tenant(tenant, secrets.token_hex(8), secrets.token_hex(8), key)


def _scopes(*scopes: str) -> list[str]:
    return [word for scope in scopes for word in ("--scope", scope)]


def _tailrace(settings: Settings, *arguments: str) -> str:
    """Run a command of the operator and return its output. Raises EnvironmentFault if it fails."""
    command = [sys.executable, "-m", "infra.cli.main", *arguments]
    environment = {**inherited_environment(), **settings.as_environment()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFault(f"tailrace {' '.join(arguments)}: {done.stdout[-1_000:]}{done.stderr[-1_000:]}")
    return done.stdout


def _ids(tenant: _Tenant) -> tuple[Any, ...]:
    return text_sought(tenant.mark), prefix_sought(tenant.id)


def _soughts(deleted: _Tenant, other: _Tenant) -> dict[str, Any]:
    names = (*(name_sought(name) for name in (deleted.id, deleted.key_id)), text_sought(deleted.request_mark))
    return {deleted.id: _ids(deleted), other.id: _ids(other), "named": names}


async def _row(settings: Settings, deleted: _Tenant, other: _Tenant) -> dict[str, Any]:
    soughts = _soughts(deleted, other)
    for tenant in (deleted, other):
        await _use_everything(settings, tenant)
    before = await asyncio.to_thread(_until_filled, settings, soughts)
    kept = await _export(settings, other)
    began_s, num_runs = time.monotonic(), 1
    delete = ("tenants", "delete", deleted.id, "--yes")
    while "is deleted" not in await asyncio.to_thread(_tailrace, settings, *delete):
        num_runs += 1
        if time.monotonic() > began_s + _DELETE_S:
            raise EnvironmentFault(f"{deleted.id} is not deleted after {_DELETE_S:g} s; the worker's log says why")
    deletion_s = time.monotonic() - began_s
    after = await asyncio.to_thread(scan, settings, soughts, EVERYWHERE)
    counts = {name: (_counts(before[name]), _counts(after[name])) for name in soughts}
    for kind, places in after[deleted.id].items():
        for place in places if not _is_kept(kind) else ():
            print(f"left in {kind}: {place}", file=sys.stderr)
    num_before, num_left = (_num_deletable(places) for places in counts[deleted.id])
    return {
        "row": "deletion",
        "deletion_s": deletion_s,
        "runs": num_runs,
        "places": num_before,
        "left": num_left,
        "kept": sum(counts[deleted.id][1].values()) - num_left,
        "before": counts[deleted.id][0],
        "after": counts[deleted.id][1],
        "named_after": counts["named"][1],
        "refused": await _is_refused(settings, deleted),
        "other": {
            "before": counts[other.id][0],
            "after": counts[other.id][1],
            "emptied": sorted(counts[other.id][0].keys() - counts[other.id][1].keys()),
            "is_same_export": kept == await _export(settings, other),
            "answered": await _answered(settings, other.key, *other.user_ids),
        },
    }


def _counts(places: Places) -> dict[str, int]:
    return {kind: len(places[kind]) for kind in sorted(places)}


def _is_kept(kind: str) -> bool:
    """Return whether a deletion leaves this kind: records until their topic's retention ends, and the audit."""
    return kind == AUDIT or kind.startswith(TOPIC)


def _num_deletable(counts: Mapping[str, int]) -> int:
    return sum(number for kind, number in counts.items() if not _is_kept(kind))


def _until_filled(settings: Settings, soughts: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Scan until every store holds ids of both tenants. Raises EnvironmentFault."""
    give_up_s = time.monotonic() + _FILL_S
    while True:
        places = scan(settings, soughts, EVERYWHERE)
        lacking = {tenant: sorted(_FILLED - places[tenant].keys()) for tenant in (DELETED, OTHER)}
        if not any(lacking.values()):
            return places
        if time.monotonic() > give_up_s:
            raise EnvironmentFault(f"stores without an id of a tenant: {lacking}; the worker's log says why")
        time.sleep(_LOOK_S)


async def _use_everything(settings: Settings, tenant: _Tenant) -> None:
    """Do all that leaves data of a tenant: at both doors, in a topic that its own producer writes to, in a training."""
    async with AsyncExitStack() as closing:
        rest = await closing.enter_async_context(RestClient(settings.http_host, settings.http_port, tenant.key))
        rpc = await closing.enter_async_context(GrpcClient(settings.grpc_address, tenant.key))
        for method, path, body in _calls_of_data(tenant):
            await _called(rest, method, path, body)
        await _until_history(rest, tenant.user_ids[0])
        for method, path, body in _calls_with_history(tenant):
            await _called(rest, method, path, body)
        for number in range(_NUM_REQUESTS):
            ask = {"user_id": tenant.user_ids[number % _NUM_USERS], "k": 3, "deadline_ms": _DEADLINE_MS}
            if not (outcome := await rpc.recommend(ask)).is_ok:
                raise EnvironmentFault(f"gRPC Recommend: {outcome.reason}")
    with topic_sender(settings, settings.interactions_topic) as send:
        user_id = scoped(tenant.id, tenant.user_ids[0])
        send([(user_id.encode(), json.dumps({"user_id": user_id, "event_time_ms": "unreadable"}).encode())])
    await asyncio.to_thread(_train, settings, tenant)


def _calls_of_data(tenant: _Tenant) -> list[tuple[str, str, Any]]:
    """Return the calls (method, path, body) of events and items, which later calls need."""
    item_id, now_ms = tenant.item_id, int(time.time() * 1_000)
    events = [
        {"user_id": user_id, "item_id": shown, "event_time_ms": now_ms}
        for user_id in tenant.user_ids
        for shown in (*_TRAINED_ITEMS, item_id)
    ]
    own = {"title": f"Own {item_id}", "categories": ["Comedy"], "available": True}
    return [
        ("PUT", f"/v1/items/{item_id}", own),
        ("PUT", f"/v1/items/{item_id}-gone", own),
        ("PATCH", f"/v1/items/{_TRAINED_ITEMS[0]}", {"available": False}),
        ("POST", "/v1/events", {"events": events}),
        ("DELETE", f"/v1/items/{item_id}-gone", None),
    ]


def _calls_with_history(tenant: _Tenant) -> list[tuple[str, str, Any]]:
    """Return the calls of requests, exports and erasures."""
    user_id, request_id, deadline = tenant.user_ids[0], f"r-{tenant.request_mark}", {"deadline_ms": _DEADLINE_MS}
    visitor = {"session_id": f"s-{tenant.mark}", "recent_item_ids": [_TRAINED_ITEMS[1], tenant.item_id], **deadline}
    shown = {"rules": {"pins": [{"item_id": tenant.item_id, "position": 1}]}}
    recommend = "/v1/recommendations"
    return [
        *(("POST", recommend, {"user_id": user_id, **deadline}) for user_id in tenant.user_ids),
        ("POST", recommend, {"user_id": user_id, "request_id": request_id, "surface": "home", **deadline}),
        ("POST", recommend, visitor | shown | {"request_id": f"{request_id}-visitor"}),
        ("POST", f"{recommend}:batch", {"requests": [{"user_id": user_id}, {"session_id": visitor["session_id"]}]}),
        ("POST", f"/v1/items/{_TRAINED_ITEMS[1]}/similar", {"user_id": user_id, "k": 2}),
        ("GET", f"/v1/search?{urlencode({'q': 'star', 'user_id': user_id})}", None),
        ("GET", f"/v1/users/{user_id}/data", None),
        ("GET", f"/v1/items/{tenant.item_id}", None),
        ("DELETE", f"/v1/users/{user_id}-gone", None),
    ]


async def _called(rest: RestClient, method: str, path: str, body: Any) -> bytes:
    """Send a call, again while it is refused. Raises EnvironmentFault for another outcome."""
    for _ in range(10):
        sent = b"" if body is None else json.dumps(body).encode()
        status, answer = await rest.call(method.encode(), path.encode(), sent)
        if status in {200, 202, 204}:
            return answer
        if status != 429:
            break
        await asyncio.sleep(_LOOK_S)
    raise EnvironmentFault(f"{method} {path}: {status} {answer[:300]!r}")


async def _until_history(rest: RestClient, user_id: str) -> None:
    give_up_s, ask = time.monotonic() + _FILL_S, {"user_id": user_id, "deadline_ms": _DEADLINE_MS}
    while json.loads(await _called(rest, "POST", "/v1/recommendations", ask))["newest_event_time_ms"] is None:
        if time.monotonic() > give_up_s:
            raise EnvironmentFault(f"no answer for {user_id} reflects its events; the worker's log says why")
        await asyncio.sleep(_LOOK_S)


def _train(settings: Settings, tenant: _Tenant) -> None:
    """Run the pipeline's first stages on tables of the tenant's users and items, whose copies they keep."""
    events, items = (settings.state_dir.parent / f"{tenant.id}-{name}.csv" for name in ("events", "items"))
    item_ids = [f"{tenant.item_id}-{number}" for number in range(_NUM_TRAINED_ITEMS)]
    _write_table(items, ("item_id", "title"), ((item_id, f"Item {item_id}") for item_id in item_ids))
    now_s = int(time.time())
    rows = (
        (user_id, item_ids[number % _NUM_TRAINED_ITEMS], now_s - number)
        for user_id in tenant.user_ids
        for number in range(_NUM_TRAINED_EVENTS)
    )
    _write_table(events, ("user_id", "item_id", "timestamp"), rows)
    tables = ("--events", str(events), "--items", str(items))
    _tailrace(settings, "pipeline", "--name", scoped_name(tenant.id, "default"), *tables, "--until", "features")


def _write_table(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows((names, *rows))


async def _export(settings: Settings, tenant: _Tenant) -> list[dict[str, Any]]:
    """Return the histories and logged events of a tenant's users."""
    async with RestClient(settings.http_host, settings.http_port, tenant.key) as rest:
        exports = [
            json.loads(await _called(rest, "GET", f"/v1/users/{user_id}/data", None)) for user_id in tenant.user_ids
        ]
    return [{name: export[name] for name in ("history", "events")} for export in exports]


async def _is_refused(settings: Settings, tenant: _Tenant) -> bool:
    async with RestClient(settings.http_host, settings.http_port, tenant.key) as rest:
        status, _ = await rest.call(b"POST", b"/v1/recommendations", b'{"user_id": "u"}')
    return status == 401


async def _answered(settings: Settings, key: str, *user_ids: str) -> float:
    """Return the fraction of requests for these users that are answered."""
    async with RestClient(settings.http_host, settings.http_port, key) as rest:
        asks = [
            {"user_id": user_ids[number % len(user_ids)], "deadline_ms": _DEADLINE_MS}
            for number in range(_NUM_REQUESTS)
        ]
        outcomes = [await rest.recommend(ask) for ask in asks]
    return sum(outcome.is_ok for outcome in outcomes) / len(outcomes)
