"""Lists: similar items against popular items and a no-op call, and the cost of an answer by kind of call.

    python -m benchmarks.serve lists --json OUT [--rounds 400] [--users 900] [--up] [--url ...]

Uses the running stack of this environment's settings; `--up` starts one and stops it afterwards. `latency`: one call at
a time over one connection, alternating kinds, so that a slow moment affects all. `cost`: answers by the LLM or, for
users with one, the cheaper stored list, singly, in a batch and in `tailrace recommend`. The cost is the processor
seconds of all of the stack's processes above idle; for `tailrace recommend` of its process, without the start of
Python and engine. One core provides one processor second per second; on a busy machine, where other tiers answer, the
rate is absent.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load.clients import RestClient, path_of
from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from benchmarks.load.footprint import Groups, Usage, find_groups, used_by
from benchmarks.load.own_stack import SETTLE_S, parse_for_stack, require_ready, stack_for
from infra.local.supervisor.ports import of_running_stack
from models.registry.store import BundleStore
from pipelines.publication.precompute import ranker_of
from pipelines.publication.user_lists import ListOptions, table_reader, write_lists
from pipelines.runner.stage import silent
from services.settings.settings import Settings, load_settings
from services.stream.rebuild import base_table

_IDLE_S = 5.0
_AT_ONCE, _BATCH = 4, 50
_DEADLINE_MS = 5_000
_STRANGER = "nobody-of-benchmarks"
Call = Callable[[], Awaitable[tuple[int, bytes]]]


def main() -> None:
    """Measure, and write the file."""
    settings = load_settings()
    options = _options(settings)
    with stack_for(settings, is_started=options.up, settle_s=SETTLE_S):
        running = of_running_stack(settings)
        report = asyncio.run(_measure(running, options))
        report["cost"].append(_cost_of_command(running, options.users))
    by_kind = {row["kind"]: row["answers_per_core_s"] for row in report["cost"]}
    command, single = by_kind["command"], by_kind["single"]
    report["command_over_single"] = round(command / single, 1) if command and single else None
    write_report(options.json, about_run("serve lists") | report)


async def _measure(settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    async with RestClient(*options.url) as rest:
        await require_ready(rest)
        item_id = BundleStore.of(settings).live().item_ids()[0]
        latency = await _latencies(rest, item_id, options.rounds)
        groups = find_groups(settings.state_dir)
        users = [str(number) for number in range(1, options.users + 1)]
        with used_by(groups) as idle:
            await asyncio.sleep(_IDLE_S)
        single = await _cost(groups, idle, "single", [_single(rest, user) for user in users], _AT_ONCE)
        batches = [users[first : first + _BATCH] for first in range(0, len(users), _BATCH)]
        batch = await _cost(groups, idle, "batch", [_batch(rest, user_ids) for user_ids in batches], 1)
    return {"latency": latency, "cost": [single, batch]}


async def _latencies(rest: RestClient, item_id: str, rounds: int) -> list[dict[str, Any]]:
    path = path_of("items", item_id) + b"/similar"
    kinds: dict[str, Call] = {
        "noop": lambda: rest.call(b"GET", b"/healthz", b""),
        "popular tier": _post(rest, b"/v1/recommendations", {"user_id": _STRANGER, "k": 10}),
        "popular": lambda: rest.call(b"GET", b"/v1/popular?k=10", b""),
        "similar": _post(rest, path, {"k": 10}),
        "similar to a user": _post(rest, path, {"k": 10, "user_id": _STRANGER}),
    }
    spent_ms: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 20):
        for kind, call in kinds.items():
            began_s = time.perf_counter()
            status, _ = await call()
            if status != 200:
                sys.exit(f"error: {kind} answers {status}")
            if number >= 20:
                spent_ms[kind].append((time.perf_counter() - began_s) * 1_000)
    rows: list[dict[str, Any]] = [
        {"kind": kind, "p50_ms": float(np.median(ms)), "p99_ms": float(np.percentile(ms, 99))}
        for kind, ms in spent_ms.items()
    ]
    popular = next(row["p50_ms"] for row in rows if row["kind"] == "popular tier")
    return [row | {"p50_over_popular_tier": round(row["p50_ms"] / popular, 2)} for row in rows]


async def _cost(groups: Groups, idle: Usage, kind: str, calls: Sequence[Call], at_once: int) -> dict[str, Any]:
    """Make the calls with this concurrency, and return their cost."""
    waiting, tiers = list(calls), Counter[str]()

    async def work() -> None:
        while waiting:
            _, body = await waiting.pop()()
            answers = json.loads(body)
            tiers.update(answer.get("tier", "error") for answer in answers.get("answers", [answers]))

    with used_by(groups) as usage:
        await asyncio.gather(*(work() for _ in range(at_once)))
    return _row(kind, tiers, sum(usage.less(idle).values()))


def _cost_of_command(settings: Settings, num_users: int) -> dict[str, Any]:
    """Write lists as `tailrace recommend` does, in this process, and return their cost."""
    ranker = ranker_of(BundleStore.of(settings).live())
    available = np.ones(len(ranker.catalogue.item_ids), dtype=bool)
    read = table_reader(base_table(settings.offline_log_dir))
    cpu_s, tiers = 0.0, Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for num in (1, num_users):  # the first call loads the engine's library
            users, out = Path(scratch) / f"{num}.txt", Path(scratch) / f"{num}.jsonl"
            users.write_text("".join(f"{number}\n" for number in range(1, num + 1)))
            before_s = time.process_time()
            write_lists(ranker, available, users, read, ListOptions(), out, silent)
            cpu_s = time.process_time() - before_s
            tiers = Counter(json.loads(line)["tier"] for line in out.read_text().splitlines())
    return _row("command", tiers, cpu_s)


def _row(kind: str, tiers: Counter[str], cpu_s: float) -> dict[str, Any]:
    """Return a row; without a rate if more than a tenth of the answers came from cheaper tiers."""
    num = tiers.total()
    is_usual = tiers["llm"] + tiers["precomputed"] >= 0.9 * num and cpu_s > 0
    rate = round(num / cpu_s, 1) if is_usual else None
    return {
        "kind": kind,
        "answers": num,
        "tiers": dict(sorted(tiers.items())),
        "cpu_s": round(cpu_s, 2),
        "answers_per_core_s": rate,
    }


def _single(rest: RestClient, user_id: str) -> Call:
    return _post(rest, b"/v1/recommendations", {"user_id": user_id, "k": 10, "deadline_ms": _DEADLINE_MS})


def _batch(rest: RestClient, user_ids: Sequence[str]) -> Call:
    entries = [{"user_id": user_id, "k": 10} for user_id in user_ids]
    return _post(rest, b"/v1/recommendations:batch", {"requests": entries, "deadline_ms": _DEADLINE_MS})


def _post(rest: RestClient, path: bytes, body: dict[str, Any]) -> Call:
    encoded = json.dumps(body).encode()
    return lambda: rest.call(b"POST", path, encoded)


def _options(settings: Settings) -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=400, help="calls of each kind")
    parser.add_argument("--users", type=at_least_one, default=900, help="users 1, 2, ... of the data")
    return parse_for_stack(parser, settings)
