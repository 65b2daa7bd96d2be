"""The axis `replicas`: `python -m benchmarks.scale.replicas SIZE` prints its row.

A whole stack with SIZE gateway processes, started from the trained state folder of the settings (`tailrace pipeline` makes one); REST, 50
requests a second of all tiers. loop_ms: processor time of all gateways per request, rss_mb: one gateway, restart_s: the stack's start.
"""

import asyncio
import sys
import time

from benchmarks.capacity.footprint import find_groups, memory_mb, used_by
from benchmarks.load.audience import find_audience
from benchmarks.load.clients import RestClient
from benchmarks.load.open_loop import percentile, run_load
from benchmarks.load.own_stack import require_ready, stack_for
from benchmarks.scale.row import print_fields
from services.settings.settings import Settings, load_settings

_RATE_RPS, _NUM_REQUESTS, _NUM_WARM = 50.0, 1_000, 200


def main(num_replicas: int) -> None:
    """Start, load, stop."""
    settings = load_settings().model_copy(update={"gateway_replicas": num_replicas})
    began_s = time.monotonic()
    with stack_for(settings, is_started=True):
        restart_s = time.monotonic() - began_s
        measured = asyncio.run(_measure(settings))
    print_fields(**measured, restart_s=restart_s)


async def _measure(settings: Settings) -> dict[str, float]:
    async with RestClient(settings.http_host, settings.http_port) as rest:
        await require_ready(rest)
        audience = await find_audience(rest)
        await run_load(lambda number: rest.recommend(audience.mixed(number)), _RATE_RPS, _NUM_WARM)
        groups = find_groups(settings.state_dir.absolute())
        with used_by(groups) as usage:
            load = await run_load(lambda number: rest.recommend(audience.mixed(number)), _RATE_RPS, _NUM_REQUESTS)
    return {
        "p99_ms": percentile([shot.latency_ms for shot in load.shots], 0.99),
        "loop_ms": 1_000 * usage.cpu_s["gateway"] / _NUM_REQUESTS,
        "rss_mb": memory_mb(groups)["gateway"],
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
