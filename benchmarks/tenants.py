"""Two tenants on one stack: the cost of a flood of one tenant for another.

    python -m benchmarks.tenants --json OUT [--rounds 3] [--seconds 10] [--flood 5] [--deadline-ms 200] [--up]
                                 [--url ...] [--grpc ...]

Tenants `a` and `b` have equal shares, keys of normal priority, and names that serve the default name's bundle. The
capacity is the rate of answers in time, ranked in full, for closed-loop callers of both, as many as give most: the
edge refuses some of more callers, and fewer leave cores idle. If `most_full_rps`, the most that both got in a case, is
far above it, `a` was within its share in all cases. `b` sends 0.4 of the capacity, within its share of 0.5: alone,
while `a` sends its share, and while `a` sends `--flood` times its share. Both are open loop, and each has a load
generator on the same machine; that of `a` runs at the lowest priority of the system. Latency counts from the intended
departure. Without `--up`, the running stack must have been started with the same tenants;
`--up` starts it.
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
from benchmarks.load.capacity import capacity_of
from benchmarks.load.clients import RestClient
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.load.open_loop import Load, RequestOutcome, Send, percentile, run_load
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
TIMES_SHARE = (0.0, 1.0, 5.0)
LOWEST_PRIORITY = 19
PAUSE_S = 5.0
NUM_CALLERS = (4, 8, 16, 32)
"""Of both tenants, to find the capacity."""
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
    names = ",".join(["default", *(scoped_name(one.id, "default") for one in tenants)])
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
        tried = [
            await capacity_of(senders, options.seconds, options.deadline_ms, _is_full, number) for number in NUM_CALLERS
        ]
        capacity_rps = max(tried)
        print(f"capacity {capacity_rps:.0f}/s, of {tried}", flush=True)
    rows = []
    with _generator(0) as other_process, _generator(LOWEST_PRIORITY) as flooding_process:
        processes = {OTHER: other_process, FLOODING: flooding_process}
        for number in range(options.rounds):
            for times_share in (*TIMES_SHARE[:-1], options.flood):
                await asyncio.sleep(PAUSE_S)
                rates = {OTHER: OTHERS_PART * capacity_rps, FLOODING: times_share * SHARE * capacity_rps}
                for row in await _case(processes, {one: rate for one, rate in rates.items() if rate}, keys, options):
                    rows.append({"round": number, "times_share": times_share, **row})
                    show(rows[-1], "round", "times_share", "tenant", "rate_rps", "p99_ms", "goodput", "full", "reasons")
    return {**about_run("tenants"), "capacity_rps": round(capacity_rps, 1), "summary": _summary(rows), "rows": rows}


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
    calls = [loop.run_in_executor(processes[one], _run_tenant, rate, keys[one], options) for one, rate in rates.items()]
    return [{"tenant": one, **row} for one, row in zip(rates, await asyncio.gather(*calls), strict=True)]


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
    while not (found := await client.recommend({"user_id": "nobody", "k": 10})).is_ok:
        if time.monotonic() > give_up_s:
            sys.exit(f"error: a tenant is not answered ({found.reason}); start the stack with --up")
        await asyncio.sleep(0.5)
    return sender(client, Audience((), (), found.item_ids).mixed, options.deadline_ms)


def _is_full(outcome: RequestOutcome) -> bool:
    """Whether the request was ranked in full."""
    return outcome.is_ok and outcome.reason != "shed"


async def _load(send: Send, rate_rps: float, options: argparse.Namespace) -> Load:
    return await run_load(send, rate_rps, max(1, round(rate_rps * options.seconds)))


def _row(load: Load, rate_rps: float, deadline_ms: int) -> dict[str, Any]:
    """Return a tenant's figures: `goodput` is the part answered in time, `full` the part that was also not shed."""
    in_time = [shot for shot in load.shots if shot.is_in_time(deadline_ms)]
    full = [shot for shot in in_time if _is_full(shot.outcome)]
    return {
        "rate_rps": round(rate_rps, 1),
        "num_requests": len(load.shots),
        "p50_ms": round(percentile([shot.latency_ms for shot in load.shots], 0.5), 2),
        "p99_ms": round(percentile([shot.latency_ms for shot in load.shots], 0.99), 2),
        "goodput": round(len(in_time) / len(load.shots), 4),
        "full": round(len(full) / len(load.shots), 4),
        "reasons": dict(Counter(shot.outcome.reason for shot in load.shots)),
    }


def _full_rps(rows: list[dict[str, Any]]) -> Counter[tuple[int, float]]:
    """Return the answers in full per second of both tenants, by round and case."""
    found = Counter[tuple[int, float]]()
    for row in rows:
        found[row["round"], row["times_share"]] += row["rate_rps"] * row["full"]
    return found


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the other tenant's median p99 in each case, its ratio to the flooded case, and its goodput under it."""
    alone, at_share, flooded = (
        [row for row in rows if row["tenant"] == OTHER and row["times_share"] == times]
        for times in sorted({row["times_share"] for row in rows})
    )
    p99s_ms = [percentile([row["p99_ms"] for row in case], 0.5) for case in (alone, at_share, flooded)]
    total = sum(row["num_requests"] for row in flooded)
    found = {
        **dict(zip(("p99_ms_alone", "p99_ms_at_share", "p99_ms_flooded"), p99s_ms, strict=True)),
        "p99_to_alone": round(p99s_ms[2] / p99s_ms[0], 3),
        "p99_to_at_share": round(p99s_ms[2] / p99s_ms[1], 3),
        "most_full_rps": round(max(_full_rps(rows).values()), 1),
        **{part: round(sum(r[part] * r["num_requests"] for r in flooded) / total, 4) for part in _PARTS},
    }
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
