"""Explanations in a real Valkey: kept for their time, replaced, found by any replica, refused in time while it is unavailable."""

import asyncio
import time

import pytest

from services.errors import DependencyAway
from services.features.explanations import RedisExplanations
from services.settings.addresses import RedisAddress
from tests.support.servers import HOST, Server

pytestmark = pytest.mark.integration


def store_at(valkey: Server, keep_s: int = 60) -> RedisExplanations:
    """One replica's client of the store."""
    return RedisExplanations(RedisAddress(host=HOST, port=valkey.port), keep_s)


async def test_what_one_replica_keeps_another_finds(valkey: Server) -> None:
    """Many in one exchange; a later record of the same id replaces the earlier; other ids are unknown."""
    here, there = store_at(valkey), store_at(valkey)

    await here.put([(f"r{number}", b"%d" % number) for number in range(500)], 5.0)
    await here.put([("r7", b"newer"), ("Grüße/ü", b"x")], 5.0)
    found = [await there.get(request_id, 5.0) for request_id in ("r0", "r7", "r499", "Grüße/ü", "r500")]
    await here.close()
    await there.close()

    assert found == [b"0", b"newer", b"499", b"x", None]


async def test_a_record_expires(valkey: Server) -> None:
    """Redis drops it by itself; no clean-up is needed."""
    store = store_at(valkey, keep_s=1)
    await store.put([("r", b"x")], 5.0)

    first = await store.get("r", 5.0)
    give_up_s = time.monotonic() + 15
    while await store.get("r", 5.0) is not None:
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.05)
    await store.close()

    assert first == b"x"


async def test_an_absent_store_is_refused_in_time(valkey: Server) -> None:
    """Killed or frozen: DependencyAway, not a wait; and it works again afterwards."""
    store = store_at(valkey)
    await store.put([("r", b"x")], 5.0)
    valkey.freeze()
    with pytest.raises(DependencyAway):
        await store.get("r", 0.2)
    with pytest.raises(DependencyAway):
        await store.put([("r", b"y")], 0.2)
    valkey.thaw()
    await asyncio.to_thread(valkey.kill)
    with pytest.raises(DependencyAway):
        await store.put([("r", b"y")], 2.0)
    await asyncio.to_thread(valkey.start)

    await store.put([("r", b"z")], 5.0)
    found = await store.get("r", 5.0)
    await store.close()

    assert found == b"z"
