"""Rates and quotas that several gateways count in a real Valkey: `pytest tests/integration/test_shared_rates.py`."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis import Redis

from services.contracts.access import Allowance
from services.errors import QuotaExceeded
from services.features.rate_counts import RedisRateCounts
from services.gateway.access.shared_rates import SharedRates, Standing
from services.settings.addresses import RedisAddress
from tests.support.rate_process import NUM_PROCESSES, PATIENT_S
from tests.support.servers import HOST, Server
from tests.support.wait import until

pytestmark = pytest.mark.integration


def run_gateways(valkey: Server, num_calls: int, count: int = NUM_PROCESSES, **limits: float) -> list[dict[str, Any]]:
    """Let so many processes make calls of one key at once; return what each printed."""
    words = [sys.executable, "-m", "tests.support.rate_process", str(valkey.port), json.dumps(limits), str(num_calls)]
    children = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(count)]
    printed = [child.communicate(timeout=240)[0] for child in children]
    assert [child.returncode for child in children] == [0] * count
    return [json.loads(text) for text in printed]


def num_exchanges(valkey: Server) -> int:
    """How many scripts Valkey ran."""
    with Redis(host=HOST, port=valkey.port) as client:
        return int(client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


@asynccontextmanager
async def gateways(valkey: Server, count: int = NUM_PROCESSES) -> AsyncIterator[list[SharedRates]]:
    """So many counters on one Valkey."""
    address = RedisAddress(host=HOST, port=valkey.port)
    made = [SharedRates(RedisRateCounts(address, count), count, timeout_s=PATIENT_S) for _ in range(count)]
    for rates in made:
        await rates.start()
    yield made
    for rates in made:
        await rates.stop()


async def spend_all(rates: SharedRates, allowance: Allowance, at_most: int = 10_000) -> list[Standing]:
    """Call until a refusal."""
    standings: list[Standing] = []
    try:
        while len(standings) < at_most:
            standings.append(await rates.spend("key", allowance))
    except QuotaExceeded:
        pass
    return standings


def test_two_processes_have_one_quota_and_a_restart_has_none_more(valkey: Server) -> None:
    """A caller with 3,000 calls a day sends them through two gateways, which restart: 3,000 pass in all, with few exchanges."""
    before = num_exchanges(valkey)
    both = run_gateways(valkey, 10_000, daily_quota=3_000)
    exchanges = num_exchanges(valkey) - before
    again = run_gateways(valkey, 100, count=1, daily_quota=3_000)

    assert sum(one["admitted"] for one in both) == 3_000
    assert again[0]["admitted"] == 0
    assert exchanges < 3_000 / 5


def test_two_processes_have_one_rate(valkey: Server) -> None:
    """Two gateways at full speed: together never more than the burst and the rate times the time, and the burst at least."""
    both = run_gateways(valkey, 100_000, rate_per_s=200, burst=300)

    lasted_s = max(one["to_unix_s"] for one in both) - min(one["from_unix_s"] for one in both)
    assert 300 <= sum(one["admitted"] for one in both) <= 300 + 200 * lasted_s


@pytest.mark.parametrize("fault", ["kill", "freeze"])
async def test_limits_hold_while_redis_is_away(valkey: Server, fault: str) -> None:
    """Redis dies or hangs after 300 of 500 calls of the day: each of two gateways lets its half of the rest through, at once, and says
    so; when Redis is back it learns of them.
    """
    allowance = Allowance(daily_quota=500)
    async with gateways(valkey) as (one, other):
        before = [await spend_all(rates, allowance, 150) for rates in (one, other)]
        await until(lambda: {rates.standing_of("key", allowance).left.today for rates in (one, other)} == {300})
        await asyncio.to_thread(valkey.kill if fault == "kill" else valkey.freeze)
        away = [await spend_all(rates, allowance) for rates in (one, other)]
        await asyncio.to_thread(valkey.ensure_running)
        await until(lambda: today(valkey) >= 500)
        with pytest.raises(QuotaExceeded):
            await one.spend("key", allowance)
        back = one.standing_of("key", allowance)

    assert [len(standings) for standings in (*before, *away)] == [150, 150, 100, 100]
    assert away[0][-1].headers()["ratelimit-policy"] == "250;w=86400;counted=replica"
    assert back.headers()["ratelimit-policy"] == "500;w=86400"


def today(valkey: Server) -> int:
    """The calls of the day as Valkey has them; 0 while it cannot say."""
    with Redis(host=HOST, port=valkey.port) as client:
        return int(client.hget("tailrace:rate:key", "today") or 0)
