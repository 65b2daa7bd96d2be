"""Overload: the stack's own capacity, then multiples of it, open loop, by door and priority.

    python -m benchmarks.serve overload --json OUT [--multiples 0.5 1 2 5 10] [--seconds 5] [--rounds 1]
                                              [--deadline-ms 200] [--url ...] [--grpc ...]

`--up` starts a stack with a key for each priority and stops it afterwards; otherwise the running stack is called
without a key, which is normal priority. The capacity of a door is the rate at which waiting callers of normal priority
are ranked in full and in time. After the last multiple, the first is measured again five seconds later
(`is_after_overload`). A row's numbers are the medians of its rounds, which take turns. Latency counts from the intended
departure. Refusals are counted by the refusing part. `goodput_of_peak` relates a row to the best of its door and
priority. `refusal_cost` is the processor time of both HAProxies for a refusal, relative to the whole stack's for an
answer of the first row. The load generator shares the cores (`generator_cpu_share`).
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.load.audience import find_audience, sender
from benchmarks.load.capacity import PAUSE_S, closed_loop_rps
from benchmarks.load.clients import LeanGrpcClient, LoadClient, RestClient
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.load.footprint import Groups, find_groups, used_by
from benchmarks.load.keys import write_caller_keys
from benchmarks.load.open_loop import Send, percentile, run_load, summary
from benchmarks.load.own_stack import parse_for_stack, require_ready, stack_for
from benchmarks.load.table import show
from services.contracts.access import Priority
from services.settings.settings import Settings, load_settings

MULTIPLES = (0.5, 1.0, 2.0, 5.0, 10.0)
_CASE = {"door", "kind", "priority", "multiple", "is_after_overload"}
_EDGES = ("edge", "ingress")


def main() -> None:
    """Measure, print a table, write the JSON."""
    settings = load_settings()
    options = _options(settings)
    keys: Mapping[Priority, str] = {Priority.NORMAL: ""}
    with tempfile.TemporaryDirectory() as folder:
        if options.up:
            keys_file = Path(folder) / "keys.json"
            keys = write_caller_keys(keys_file).by_priority
            settings = settings.model_copy(update={"api_keys_file": keys_file})
        with stack_for(settings, is_started=options.up):
            report = uvloop.run(_measure(options, keys, find_groups(settings.state_dir)))
    write_report(options.json, report)


def _options(settings: Settings) -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--multiples", type=above_zero, nargs="+", default=MULTIPLES, help="of the capacity")
    parser.add_argument("--seconds", type=above_zero, default=5.0, help="per case")
    parser.add_argument("--rounds", type=at_least_one, default=1, help="of all multiples; rows are medians")
    parser.add_argument("--deadline-ms", type=at_least_one, default=200)
    return parse_for_stack(parser, settings)


async def _measure(options: argparse.Namespace, keys: Mapping[Priority, str], groups: Groups) -> dict[str, Any]:
    rows = []
    async with AsyncExitStack() as closing:
        host, port = options.url
        rest = {
            priority: await closing.enter_async_context(RestClient(host, port, key)) for priority, key in keys.items()
        }
        rpc = {
            priority: await closing.enter_async_context(LeanGrpcClient(options.grpc, key))
            for priority, key in keys.items()
        }
        await require_ready(rest[Priority.NORMAL])
        audience = await find_audience(rest[Priority.NORMAL])

        doors: tuple[tuple[str, Mapping[Priority, LoadClient]], ...] = (("rest", rest), ("grpc", rpc))
        for door, callers in doors:
            sends = {priority: sender(own, audience.mixed, options.deadline_ms) for priority, own in callers.items()}
            capacity_rps = await closed_loop_rps([sends[Priority.NORMAL]], options.seconds, options.deadline_ms)
            print(f"{door:5} capacity {capacity_rps:.0f}/s", flush=True)
            for priority in sorted(callers):
                case = {"door": door, "priority": priority.name.lower()}
                rows += await overload_rows(sends[priority], case, capacity_rps, options, groups)
    return {**about_run("serve overload"), "rows": rows}


async def overload_rows(
    send: Send, case: dict[str, Any], capacity_rps: float, options: argparse.Namespace, groups: Groups
) -> list[dict[str, Any]]:
    """Return a row for each multiple of the capacity, and one for the first multiple after the overload."""
    rounds: list[list[dict[str, Any]]] = []
    for _ in range(options.rounds):
        rows: list[dict[str, Any]] = []
        for index, multiple in enumerate([*options.multiples, options.multiples[0]]):
            await asyncio.sleep(PAUSE_S)
            about = case | {"multiple": multiple, "is_after_overload": index == len(options.multiples)}
            rows.append(await overload_row(send, about, capacity_rps, options, groups))
        rounds.append(rows)
    rows = [median_row(own) for own in zip(*rounds, strict=True)]
    peak_rps = max(row["goodput_rps"] for row in rows)
    for row in rows:
        row["goodput_of_peak"] = round(row["goodput_rps"] / peak_rps, 3) if peak_rps else None
        row["refusal_cost"] = refusal_cost(row, rows[0])
    return rows


def median_row(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a row's numbers over its rounds, and each round's goodput."""
    medians = {name: _median([row[name] for row in rounds]) for name in rounds[0].keys() - _CASE}
    return rounds[0] | medians | {"goodput_rps_by_round": [row["goodput_rps"] for row in rounds]}


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _median([value.get(name, 0) for value in values]) for name in sorted(set().union(*values))}
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def refusal_cost(row: dict[str, Any], first: dict[str, Any]) -> float | None:
    """Return the processor time of a refusal relative to an answer's; None for a row with few refusals."""
    num, answer_ms = row["num_requests"], sum(first["cpu_ms_by_group"].values())
    if row["refused"] < 0.5 or not answer_ms:
        return None
    row_ms, first_ms = (sum(own["cpu_ms_by_group"].get(name, 0.0) for name in _EDGES) for own in (row, first))
    refusals_ms = num * row_ms - num * (1 - row["refused"]) * first_ms
    return round(float(max(0.0, refusals_ms) / (num * row["refused"]) / answer_ms), 3)


async def overload_row(
    send: Send, case: dict[str, Any], capacity_rps: float, options: argparse.Namespace, groups: Groups
) -> dict[str, Any]:
    """Return the row of one multiple of the capacity, and print it."""
    rate_rps = case["multiple"] * capacity_rps
    with used_by(groups) as usage:
        load = await run_load(send, rate_rps, max(1, round(rate_rps * options.seconds)))
    answered_ms = [shot.latency_ms for shot in load.shots if shot.outcome.is_ok]
    refused_ms = [shot.latency_ms for shot in load.shots if not shot.outcome.is_ok]
    row: dict[str, Any] = {
        **case,
        "capacity_rps": round(capacity_rps, 1),
        "refused": round(len(refused_ms) / len(load.shots), 5),
        "answered_p99_ms": round(percentile(answered_ms, 0.99), 2) if answered_ms else None,
        "refused_p99_ms": round(percentile(refused_ms, 0.99), 2) if refused_ms else None,
        **summary(load, rate_rps, options.deadline_ms),
        "cpu_ms_by_group": {name: round(1_000 * cpu_s / len(load.shots), 3) for name, cpu_s in usage.cpu_s.items()},
    }
    show(row, "door", "priority", "multiple", "rate_rps", "goodput_rps", "answered_p99_ms", "refused_p99_ms", "reasons")
    return row
