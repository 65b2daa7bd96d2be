"""What a request costs: CPU time by tier and process, memory by process, bytes per user, on the stack that runs.

    python -m benchmarks.capacity --json OUT [--rate 25] [--seconds 15]

CPU time is counted by the kernel for each process, so other work on the same cores changes it little, unlike latencies. What
the stack uses when nobody asks is measured first and taken off. `tailrace plan` computes from this file.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.audience import TIERS, find_audience
from benchmarks.callers import RestCaller
from benchmarks.footprint import cpu_seconds, find_groups, log_bytes_per_event, memory_mb, store_bytes
from benchmarks.load import run_load
from models.config_json import read_config
from models.registry import BundleStore
from services.settings import Settings, load_settings

HEAD_ITEMS = 100_000
_PAUSE_S = 1.0
_PATIENT_MS = 5_000
_NUM_CHECKED = 20
_MIN_SHARE = 0.95


def main() -> None:
    """Measure, print, write the JSON."""
    settings = load_settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--rate", type=float, default=25.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="per case")
    options = parser.parse_args()
    report = asyncio.run(_measure(settings, options))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")


async def _measure(settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    async with RestCaller(settings.http_host, settings.http_port) as rest:
        if (await rest.call(b"GET", b"/readyz", b""))[0] != 200:
            sys.exit("error: no stack is ready; run `tailrace up` first")
        audience = await find_audience(rest, (str(number) for number in range(1, 201)))
        state_dir = settings.state_dir.absolute()
        idle = await _cost(state_dir, lambda _: asyncio.sleep(1 / options.rate), options, {})
        requests = {}
        for tier in TIERS:
            asks = audience.asks(tier)
            if asks is None:
                sys.exit(f"error: nobody is answered by {tier}; the stack must have been trained on ml-100k")
            per_request = await _cost(
                state_dir, lambda n, asks=asks: rest.recommend({**asks(n), "deadline_ms": _PATIENT_MS}), options, idle
            )
            requests[tier] = per_request
            print(f"{tier:12} {_shown(per_request)}")
            await _require(tier, asks, rest)
        events = await _cost(state_dir, lambda n: _click(rest, n), options, idle)
        print(f"{'event':12} {_shown(events)}")
    return {
        "benchmark": "capacity",
        "command": f"python -m benchmarks.capacity {' '.join(sys.argv[1:])}",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
        "load_average_1m": round(os.getloadavg()[0], 1),
        "rate": options.rate,
        "bundle": _bundle(settings),
        "idle_cpu_ms_per_s": {name: round(ms * options.rate, 2) for name, ms in idle.items()},
        "cpu_ms_per_request": requests,
        "cpu_ms_per_event": events,
        "head_ms_per_100k_items": _head_ms(),
        "memory_mb": memory_mb(find_groups(state_dir)),
        "store": store_bytes(settings.redis_address),
        "log_bytes_per_event": round(log_bytes_per_event(), 1),
    }


async def _cost(state_dir: Path, send: Any, options: argparse.Namespace, idle: dict[str, float]) -> dict[str, float]:
    """Give the CPU milliseconds that one call costs each group of processes, less what they use when idle."""
    groups = find_groups(state_dir)
    num_calls = round(options.rate * options.seconds)
    before, began_s = cpu_seconds(groups), time.monotonic()
    if idle:
        await run_load(send, options.rate, num_calls)
    await asyncio.sleep(options.seconds if not idle else _PAUSE_S)
    lasted_s = time.monotonic() - began_s
    used = {name: 1_000 * (seconds - before[name]) for name, seconds in cpu_seconds(groups).items()}
    if not idle:
        return {name: ms / lasted_s / options.rate for name, ms in used.items()}
    free = {name: ms * options.rate * lasted_s for name, ms in idle.items()}
    return {name: round(max(0.0, (ms - free[name]) / num_calls), 4) for name, ms in used.items()}


async def _require(tier: str, asks: Any, rest: RestCaller) -> None:
    """See that these requests are still answered by the tier that they were counted for."""
    outcomes = [await rest.recommend({**asks(number), "deadline_ms": _PATIENT_MS}) for number in range(_NUM_CHECKED)]
    share = sum(outcome.tier == tier for outcome in outcomes) / _NUM_CHECKED
    if share < _MIN_SHARE:
        sys.exit(f"error: only {share:.0%} of the answers came from {tier}; try again on a quieter machine")


async def _click(rest: RestCaller, number: int) -> Any:
    from benchmarks.load import Outcome

    event = {"user_id": f"load-{number % 50}", "item_id": str(1 + number % 200)}
    status, _ = await rest.call(b"POST", b"/v1/events", json.dumps(event).encode())
    return Outcome(is_ok=status == 200, tier="none", reason=f"http_{status}")


def _head_ms() -> float:
    """Time the step that grows with the catalogue, in both models: one vector against every item, then the best 100."""
    torch.set_num_threads(1)
    hidden_1D, head_VD = torch.randn(1, 64), torch.randn(HEAD_ITEMS, 64)
    took_s = []
    for _ in range(30):
        began_s = time.thread_time()
        (hidden_1D @ head_VD.T).topk(100)
        took_s.append(time.thread_time() - began_s)
    return round(1_000 * sorted(took_s)[len(took_s) // 2], 3)


def _bundle(settings: Settings) -> dict[str, Any]:
    bundle = BundleStore(settings.bundle_root).live()
    config = read_config(bundle.path / "decoder")
    num_items = len(bundle.catalogue().item_ids)
    weights = sum(path.stat().st_size for path in (bundle.path / "decoder").glob("*.safetensors"))
    return {
        "num_items": num_items,
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "decoder_bytes": weights,
        "student_bytes": bundle.student_path.stat().st_size,
    }


def _shown(costs: dict[str, float]) -> str:
    return "  ".join(f"{name} {ms:.2f}" for name, ms in costs.items()) + "  ms of CPU"


if __name__ == "__main__":
    main()
