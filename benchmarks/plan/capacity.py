"""The cost of a request: CPU time by tier and process, memory by process, bytes per user, on the running stack.

    python -m benchmarks.plan capacity --json OUT [--rate 25] [--seconds 15]

The kernel counts CPU time per process, so other work on the same cores changes it little, unlike latencies. The idle
consumption is measured first and subtracted. `tailrace plan load` computes from this file.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.load.audience import TIERS, sender
from benchmarks.load.clients import RestClient
from benchmarks.load.command import about_run, above_zero, report_parser, write_report
from benchmarks.load.footprint import Usage, find_groups, log_bytes_per_event, memory_mb, store_bytes, used_by
from benchmarks.load.open_loop import RequestOutcome, Send, run_load
from benchmarks.load.own_stack import ready_stack
from models.decoder.config import read_config
from models.registry.store import BundleStore
from services.settings.settings import Settings, load_settings

HEAD_ITEMS = 100_000
_PAUSE_S = 1.0
_PATIENT_MS = 5_000
_NUM_CHECKED = 20
_MIN_SHARE = 0.95


def main() -> None:
    """Measure, print, write the JSON."""
    settings = load_settings()
    parser = report_parser(__doc__)
    parser.add_argument("--rate", type=above_zero, default=25.0, help="requests a second")
    parser.add_argument("--seconds", type=above_zero, default=15.0, help="per case")
    options = parser.parse_args()
    report = asyncio.run(_measure(settings, options))
    write_report(options.json, report)


async def _measure(settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    async with ready_stack((settings.http_host, settings.http_port)) as (rest, audience):
        state_dir = settings.state_dir.absolute()
        with used_by(find_groups(state_dir)) as idle:
            await asyncio.sleep(options.seconds)
        requests = {}
        for tier in TIERS:
            asks = audience.asks(tier)
            if asks is None:
                sys.exit(f"error: no request is answered by {tier}; the stack must have been trained on ml-100k")
            send = sender(rest, asks, _PATIENT_MS)
            per_request = await _cost(state_dir, send, options, idle)
            requests[tier] = per_request
            print(f"{tier:12} {_shown(per_request)}")
            await _require(tier, send)
        events = await _cost(state_dir, lambda n: _click(rest, n), options, idle)
        print(f"{'event':12} {_shown(events)}")
    return {
        **about_run("plan capacity"),
        "load_average_1m": round(os.getloadavg()[0], 1),
        "rate": options.rate,
        "bundle": _bundle(settings),
        "idle_cpu_ms_per_s": {name: round(1_000 * s / idle.wall_s, 2) for name, s in idle.cpu_s.items()},
        "cpu_ms_per_request": requests,
        "cpu_ms_per_event": events,
        "head_ms_per_100k_items": _head_ms(),
        "memory_mb": memory_mb(find_groups(state_dir)),
        "store": store_bytes(settings.redis_address),
        "log_bytes_per_event": round(log_bytes_per_event(), 1),
    }


async def _cost(state_dir: Path, send: Send, options: argparse.Namespace, idle: Usage) -> dict[str, float]:
    """Return the CPU milliseconds of one call in each group of processes, minus the idle consumption."""
    num_calls = max(1, round(options.rate * options.seconds))
    with used_by(find_groups(state_dir)) as usage:
        await run_load(send, options.rate, num_calls)
        await asyncio.sleep(_PAUSE_S)
    return {name: round(max(0.0, 1_000 * seconds / num_calls), 4) for name, seconds in usage.less(idle).items()}


async def _require(tier: str, send: Send) -> None:
    """Check that the tier assigned to these requests still answers them."""
    outcomes = [await send(number) for number in range(_NUM_CHECKED)]
    share = sum(outcome.tier == tier for outcome in outcomes) / _NUM_CHECKED
    if share < _MIN_SHARE:
        sys.exit(f"error: only {share:.0%} of the answers came from {tier}; try again on a quieter machine")


async def _click(rest: RestClient, number: int) -> Any:
    event = {"user_id": f"load-{number % 50}", "item_id": str(1 + number % 200)}
    status, _ = await rest.call(b"POST", b"/v1/events", json.dumps(event).encode())
    return RequestOutcome(is_ok=status == 200, tier="none", reason=f"http_{status}")


def _head_ms() -> float:
    """Time the step that grows with the catalogue in both models: one vector against every item, then the top 100."""
    torch.set_num_threads(1)
    hidden_1D, head_VD = torch.randn(1, 64), torch.randn(HEAD_ITEMS, 64)
    took_s = []
    for _ in range(30):
        began_s = time.thread_time()
        (hidden_1D @ head_VD.T).topk(100)
        took_s.append(time.thread_time() - began_s)
    return round(1_000 * median(took_s), 3)


def _bundle(settings: Settings) -> dict[str, Any]:
    bundle = BundleStore.of(settings).live()
    config = read_config(bundle.path / "decoder")
    weights = sum(path.stat().st_size for path in (bundle.path / "decoder").glob("*.safetensors"))
    return {
        "num_items": len(bundle.catalogue().item_ids),
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "decoder_bytes": weights,
        "student_bytes": bundle.student_path.stat().st_size,
    }


def _shown(costs: dict[str, float]) -> str:
    return "  ".join(f"{name} {ms:.2f}" for name, ms in costs.items()) + "  ms of CPU"
