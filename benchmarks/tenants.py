"""Two tenants on one stack: the cost of a flood of one tenant for another.

    python -m benchmarks.tenants --json OUT [--rounds 3] [--seconds 10] [--flood 5] [--deadline-ms 200] [--up]
                                 [--url ...] [--grpc ...]

Tenants `a` and `b` have equal shares, keys of normal priority, and names that serve the default name's bundle. The
capacity is found by the cases' own load: both send 0.9 of a rate, divided as in the cases, and the rate falls by a
tenth until 0.995 of each tenant's requests are answered in time and in full. It begins at the rate of closed-loop
callers, which is higher: they wait while the gateways are late. `b` sends 0.4 of the capacity, within its share of
0.5: alone, while `a` sends its share, and while `a` sends 1.2, 1.5, 2 and `--flood` times its share. If
`most_full_rps`, the most that both got in a case, is far above the capacity, `a` was within its share in all cases.
Both are open loop, and each has a load generator on the same machine; that of `a` runs at the lowest priority of the
system. Latency counts from the intended departure. Without `--up`, the running stack must have been started with the
same tenants; `--up` starts it.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.load.audience import Audience, sender
from benchmarks.load.capacity import PAUSE_S, closed_loop_rps, full_share, sustained_rps
from benchmarks.load.clients import RestClient
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.load.open_loop import Load, Send, percentile, run_load
from benchmarks.load.own_stack import parse_for_stack, require_ready, stack_for
from benchmarks.load.table import show
from models.registry.store import BundleStore
from services.contracts.access import Scope
from services.contracts.tenant import scoped_name
from services.gateway.access.keys import KeysFile, StoredHash, StoredKey, hash_of, make_key, write_keys
from services.gateway.access.tenants import StoredTenant, TenantsFile, write_tenants
from services.settings.settings import Settings, load_settings

FLOODING, OTHER = "a", "b"
SHARE, OTHERS_PART = 0.5, 0.4
TIMES_SHARE = (0.0, 1.0, 1.2, 1.5, 2.0, 5.0)
LOWEST_PRIORITY = 19
_PARTS = ("goodput", "full")
_MEMORY_GIB, _START_S = 2.0, 120.0


def main() -> None:
    """Measure, print a table, write the JSON."""
    options = _options(load_settings())
    with tempfile.TemporaryDirectory() as folder:
        keys = {tenant: make_key() for tenant in ("", FLOODING, OTHER)}
        settings = _with_tenants(load_settings(), Path(folder), keys)
        _promote(settings)
        with stack_for(settings, is_started=options.up):
            report = asyncio.run(_measure(options, keys))
    write_report(options.json, report)


def _options(settings: Settings) -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--seconds", type=above_zero, default=10.0, help="per case")
    parser.add_argument("--flood", type=above_zero, default=TIMES_SHARE[-1], help="times its share that tenant a sends")
    parser.add_argument("--deadline-ms", type=at_least_one, default=200)
    return parse_for_stack(parser, settings)


def _with_tenants(settings: Settings, folder: Path, keys: dict[str, str]) -> Settings:
    """Write both files, and return settings with two tenants whose models share the replicas."""
    stored = [
        StoredKey(
            id=f"key-{tenant or 'operator'}",
            hashes=(StoredHash(sha256=hash_of(key)),),
            scopes=frozenset(Scope),
            tenant=tenant,
        )
        for tenant, key in keys.items()
    ]
    write_keys(folder / "keys.json", KeysFile(keys=tuple(stored)))
    tenants = tuple(StoredTenant(id=tenant) for tenant in (FLOODING, OTHER))
    write_tenants(folder / "tenants.json", TenantsFile(tenants=tenants))
    names = ",".join(["default", *(scoped_name(tenant.id, "default") for tenant in tenants)])
    files = {"api_keys_file": folder / "keys.json", "tenants_file": folder / "tenants.json"}
    return settings.model_copy(update=files | {"names": names, "llm_memory_gib": _MEMORY_GIB})


def _promote(settings: Settings) -> None:
    """Let both tenants serve the default name's bundle."""
    default = BundleStore.of(settings)
    if (version := default.live_version()) is None:
        sys.exit(f"error: {settings.bundle_root} has no bundle; run `tailrace up` there once")
    for tenant in (FLOODING, OTHER):
        own = default.named(scoped_name(tenant, "default"))
        if own.live_version() != version:
            own.promote(version)


async def _measure(options: argparse.Namespace, keys: dict[str, str]) -> dict[str, Any]:
    host, port = options.url
    async with RestClient(host, port, keys[FLOODING]) as flooding, RestClient(host, port, keys[OTHER]) as other:
        await require_ready(other)
        senders = [await _sender(client, options) for client in (flooding, other)]
        first_rps = await closed_loop_rps(senders, options.seconds, options.deadline_ms)
    rows = []
    with _generator(0) as other_process, _generator(LOWEST_PRIORITY) as flooding_process:
        processes = {OTHER: other_process, FLOODING: flooding_process}

        async def share_at(rate_rps: float) -> float:
            rows = await _case(processes, _rates(rate_rps, 1.0), keys, options)
            return min(float(row["full"]) for row in rows)

        capacity_rps = await sustained_rps(first_rps, share_at)
        for number in range(options.rounds):
            for times_share in (*(multiple for multiple in TIMES_SHARE if multiple < options.flood), options.flood):
                await asyncio.sleep(PAUSE_S)
                rates = _rates(capacity_rps, times_share)
                for row in await _case(
                    processes, {tenant: rate for tenant, rate in rates.items() if rate}, keys, options
                ):
                    rows.append({"round": number, "times_share": times_share, **row})
                    show(rows[-1], "round", "times_share", "tenant", "rate_rps", "p99_ms", "goodput", "full", "reasons")
    return {**about_run("tenants"), "capacity_rps": round(capacity_rps, 1), "summary": _summary(rows), "rows": rows}


def _rates(capacity_rps: float, times_share: float) -> dict[str, float]:
    return {OTHER: OTHERS_PART * capacity_rps, FLOODING: times_share * SHARE * capacity_rps}


@contextmanager
def _generator(niceness: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a started process with this addition to its niceness."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=os.nice, initargs=(niceness,)) as process:
        process.submit(int).result()
        yield process


async def _case(
    processes: Mapping[str, ProcessPoolExecutor],
    rates: dict[str, float],
    keys: dict[str, str],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a row of each tenant, from a process of its own."""
    loop = asyncio.get_running_loop()
    calls = [
        loop.run_in_executor(processes[tenant], _run_tenant, rate, keys[tenant], options)
        for tenant, rate in rates.items()
    ]
    return [{"tenant": tenant, **row} for tenant, row in zip(rates, await asyncio.gather(*calls), strict=True)]


def _run_tenant(rate_rps: float, key: str, options: argparse.Namespace) -> dict[str, Any]:
    """Send one tenant's requests, and return its row."""

    async def run() -> dict[str, Any]:
        host, port = options.url
        async with RestClient(host, port, key) as client:
            load = await _load(await _sender(client, options), rate_rps, options)
            return _row(load, rate_rps, options.deadline_ms)

    return asyncio.run(run())


async def _sender(client: RestClient, options: argparse.Namespace) -> Send:
    """Return a sender of mixed requests once the tenant's bundle answers; its users are unknown, its visitors not."""
    give_up_s = time.monotonic() + _START_S
    while not (outcome := await client.recommend({"user_id": "nobody", "k": 10})).is_ok:
        if time.monotonic() > give_up_s:
            sys.exit(f"error: a tenant is not answered ({outcome.reason}); start the stack with --up")
        await asyncio.sleep(0.5)
    return sender(client, Audience((), (), outcome.item_ids).mixed, options.deadline_ms)


async def _load(send: Send, rate_rps: float, options: argparse.Namespace) -> Load:
    return await run_load(send, rate_rps, max(1, round(rate_rps * options.seconds)))


def _row(load: Load, rate_rps: float, deadline_ms: int) -> dict[str, Any]:
    """Return a tenant's figures: `goodput` is the part answered in time, `full` the part that was also not shed."""
    in_time = [shot for shot in load.shots if shot.is_in_time(deadline_ms)]
    return {
        "rate_rps": round(rate_rps, 1),
        "num_requests": len(load.shots),
        "p50_ms": round(percentile([shot.latency_ms for shot in load.shots], 0.5), 2),
        "p99_ms": round(percentile([shot.latency_ms for shot in load.shots], 0.99), 2),
        "goodput": round(len(in_time) / len(load.shots), 4),
        "full": round(full_share(load, deadline_ms), 4),
        "reasons": dict(Counter(shot.outcome.reason for shot in load.shots)),
    }


def _full_rps(rows: list[dict[str, Any]]) -> Counter[tuple[int, float]]:
    """Return the answers in full per second of both tenants, by round and case."""
    full_rps = Counter[tuple[int, float]]()
    for row in rows:
        full_rps[row["round"], row["times_share"]] += row["rate_rps"] * row["full"]
    return full_rps


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the other tenant's median p99 in each case, their ratios, and the goodput of both by case."""
    times = sorted({row["times_share"] for row in rows})
    cases = {
        (tenant, times_share): [row for row in rows if row["tenant"] == tenant and row["times_share"] == times_share]
        for tenant in (OTHER, FLOODING)
        for times_share in times
    }
    p99s_ms = {
        times_share: percentile([row["p99_ms"] for row in cases[OTHER, times_share]], 0.5) for times_share in times
    }
    alone_ms, at_share_ms, flooded_ms = p99s_ms[0.0], p99s_ms[1.0], p99s_ms[times[-1]]
    summary = {
        "p99_ms_alone": alone_ms,
        "p99_ms_at_share": at_share_ms,
        "p99_ms_flooded": flooded_ms,
        "p99_to_alone": round(flooded_ms / alone_ms, 3),
        "p99_to_at_share": round(flooded_ms / at_share_ms, 3),
        "p99_to_at_share_by_times": {
            str(times_share): round(p99s_ms[times_share] / at_share_ms, 3) for times_share in times if times_share > 1
        },
        "full_at_share": {tenant: _mean(cases[tenant, 1.0], "full") for tenant in (OTHER, FLOODING)},
        "least_goodput": min(_mean(cases[OTHER, times_share], "goodput") for times_share in times if times_share > 1),
        "most_full_rps": round(max(_full_rps(rows).values()), 1),
        **{part: _mean(cases[OTHER, times[-1]], part) for part in _PARTS},
    }
    print(json.dumps(summary), flush=True)
    return summary


def _mean(rows: list[dict[str, Any]], part: str) -> float:
    """Return the mean of a part over all requests of these rows."""
    total: int = sum(row["num_requests"] for row in rows)
    in_part: float = sum(row[part] * row["num_requests"] for row in rows)
    return round(in_part / total, 4)


if __name__ == "__main__":
    main()
