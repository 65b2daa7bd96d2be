"""Rates and quotas of several gateways in a real Valkey: `pytest tests/integration/doors/test_shared_rates.py`."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis import Redis

from services.contracts.access import Allowance, Ask
from services.errors import QuotaExceeded
from services.features.rate_counts import RedisRateCounts
from services.gateway.access.shared_rates import SharedRates, Standing
from services.settings.addresses import RedisAddress
from tests.support.servers import HOST, Server
from tests.support.wait import until

PATIENT_S = 1.0
"""The time of an exchange, so that results do not depend on this machine's speed."""
FORGET_S = 1.1
"""Longer than a refusal is cached."""


def num_exchanges(valkey: Server) -> int:
    """Return the number of scripts that Valkey ran."""
    with Redis(host=HOST, port=valkey.port) as client:
        return int(client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


@asynccontextmanager
async def gateways(valkey: Server, count: int = 2) -> AsyncIterator[list[SharedRates]]:
    """This number of counters on one Valkey."""
    address = RedisAddress(host=HOST, port=valkey.port)
    made = [SharedRates(RedisRateCounts(address), count, timeout_s=PATIENT_S) for _ in range(count)]
    for rates in made:
        await rates.start()
    yield made
    for rates in made:
        await rates.stop()


async def spend_all(
    rates: SharedRates, allowance: Allowance, at_most: int = 10_000, num_refusals: int = 1
) -> list[Standing]:
    """Call until this number of refusals, with pauses for other gateways to return unused calls."""
    standings: list[Standing] = []
    while len(standings) < at_most:
        try:
            standings.append(await rates.spend("key", allowance))
        except QuotaExceeded as refused:
            num_refusals -= 1
            if num_refusals == 0:
                break
            await asyncio.sleep(min(FORGET_S, refused.retry_after_s or 0.0))
    return standings


async def test_two_gateways_have_one_quota_and_a_restart_has_none_more(valkey: Server) -> None:
    """A quota of 3,000 calls a day over two restarting gateways admits 3,000 calls in total, with few exchanges."""
    allowance, before = Allowance(daily_quota=3_000), num_exchanges(valkey)
    async with gateways(valkey) as both:
        admitted = await asyncio.gather(*(spend_all(rates, allowance, num_refusals=2) for rates in both))
    exchanges = num_exchanges(valkey) - before
    async with gateways(valkey, 1) as (again,):
        after_restart = await spend_all(again, allowance)

    assert sum(map(len, admitted)) == 3_000
    assert after_restart == []
    assert exchanges < 3_000 / 5


async def test_a_rate_that_takes_ages_to_fill_counts(valkey: Server) -> None:
    """Its count would live longer than Redis can tell; an error would leave all keys of the gateway uncounted."""
    counts = RedisRateCounts(RedisAddress(host=HOST, port=valkey.port), is_peer=False)
    ask = Ask(cost=1, batch=0, spent=0, unspent=0, taken_on="")
    grants = [await counts.ask("key", Allowance(rate_per_s=1e-18, burst=2), ask, PATIENT_S) for _ in range(3)]
    await counts.close()

    assert [grant.num_calls for grant in grants] == [1, 1, 0]


async def test_two_gateways_have_one_rate(valkey: Server) -> None:
    """At full speed two gateways together admit at least the burst, and at most the burst plus rate times time."""
    allowance, began_s = Allowance(rate_per_s=200, burst=300), time.monotonic()
    async with gateways(valkey) as both:
        admitted = await asyncio.gather(*(spend_all(rates, allowance, num_refusals=3) for rates in both))
        lasted_s = time.monotonic() - began_s

    assert 300 <= sum(map(len, admitted)) <= 300 + 200 * lasted_s


@pytest.mark.parametrize("fault", ["kill", "freeze"])
async def test_limits_hold_while_redis_is_unavailable(valkey: Server, fault: str) -> None:
    """Redis dies or hangs after 300 of 500 daily calls: each of two gateways admits half of the rest immediately.

    The gateways report it; when Redis is back it learns of these calls.
    """
    allowance = Allowance(daily_quota=500)
    async with gateways(valkey) as (first, other):
        before = [await spend_all(rates, allowance, 150) for rates in (first, other)]
        await until(lambda: {rates.standing_of("key", allowance).left.today for rates in (first, other)} == {300})
        await asyncio.to_thread(valkey.kill if fault == "kill" else valkey.freeze)
        away = [await spend_all(rates, allowance) for rates in (first, other)]
        await asyncio.to_thread(valkey.ensure_running)
        await until(lambda: today(valkey) >= 500)
        with pytest.raises(QuotaExceeded):
            await first.spend("key", allowance)
        back = first.standing_of("key", allowance)

    assert [len(standings) for standings in (*before, *away)] == [150, 150, 100, 100]
    assert away[0][-1].headers()["ratelimit-policy"] == "250;w=86400;counted=replica"
    assert back.headers()["ratelimit-policy"] == "500;w=86400"


async def test_the_processes_that_count_are_counted(valkey: Server) -> None:
    """Each gateway counts from its first report until it ends; the standby does not count and keeps the whole limit."""
    address = RedisAddress(host=HOST, port=valkey.port)
    first, second, third = (RedisRateCounts(address) for _ in range(3))
    standby = RedisRateCounts(address, is_peer=False)
    come = [await process.check(PATIENT_S) for process in (first, second, third, first, standby)]
    await third.close()
    left = [await process.check(PATIENT_S) for process in (first, second)]
    for process in (first, second, standby):
        await process.close()

    assert (come, left) == ([1, 2, 3, 3, 1], [2, 2])


def today(valkey: Server) -> int:
    """Return the calls of the day in Valkey; 0 while it does not answer."""
    with Redis(host=HOST, port=valkey.port) as client:
        return int(client.hget("tailrace:rate:key", "today") or 0)
