"""Explanations in a real Valkey: expiry, replacement, reads by any replica, quick refusal during an outage."""

import asyncio

import pytest
from redis import Redis

from services.contracts.message import MAX_ID_CHARS
from services.errors import DependencyUnavailable
from services.features.explanations import RedisExplanations
from services.features.repo import RepoAddress
from services.features.writer import FeatureWriter
from services.settings.addresses import RedisAddress
from tests.support.gateway.rows import history_row
from tests.support.servers import HOST, Server
from tests.support.wait import until_answer


def store_at(valkey: Server, keep_s: int = 60, max_bytes: int = 2**20) -> RedisExplanations:
    return RedisExplanations(RedisAddress(host=HOST, port=valkey.port), keep_s, max_bytes)


async def test_what_one_replica_keeps_another_finds(valkey: Server) -> None:
    """Many explanations are written in one exchange; a later record replaces an earlier one; other IDs are unknown."""
    here, there = store_at(valkey), store_at(valkey)

    await here.put([(f"r{number}", b"%d" % number) for number in range(500)], 5.0)
    await here.put([("r7", b"newer"), ("Grüße/ü", b"x")], 5.0)
    records = [await there.get(request_id, 5.0) for request_id in ("r0", "r7", "r499", "Grüße/ü", "r500")]
    await here.close()
    await there.close()

    assert records == [b"0", b"newer", b"499", b"x", None]


async def test_a_record_expires(valkey: Server) -> None:
    """Redis drops expired explanations by itself; no clean-up is needed."""
    store = store_at(valkey, keep_s=1)
    await store.put([("r", b"x")], 5.0)

    first = await store.get("r", 5.0)
    await until_answer(lambda: store.get("r", 5.0), lambda record: record is None)
    await store.close()

    assert first == b"x"


async def test_an_absent_store_is_refused_in_time(valkey: Server) -> None:
    """A killed or frozen store raises DependencyUnavailable without a wait; afterwards it works again."""
    store = store_at(valkey)
    await store.put([("r", b"x")], 5.0)
    valkey.freeze()
    with pytest.raises(DependencyUnavailable):
        await store.get("r", 0.2)
    with pytest.raises(DependencyUnavailable):
        await store.put([("r", b"y")], 0.2)
    valkey.thaw()
    await asyncio.to_thread(valkey.kill)
    with pytest.raises(DependencyUnavailable):
        await store.put([("r", b"y")], 2.0)
    await asyncio.to_thread(valkey.start)

    await store.put([("r", b"z")], 5.0)
    record = await store.get("r", 5.0)
    await store.close()

    assert record == b"z"


async def test_callers_with_long_ids_leave_the_features_their_room(features: RepoAddress, valkey: Server) -> None:
    """Explanations with long IDs stay within their bytes, the newest are readable, and a click is still written."""
    budget_bytes = 2**20
    store, writer = store_at(valkey, max_bytes=budget_bytes), FeatureWriter(features)
    with Redis(host=HOST, port=valkey.port) as client:
        writer.write_histories([history_row("before")])
        used_bytes = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used_bytes + 4 * budget_bytes)
        longest = "\U0001f600" * MAX_ID_CHARS
        for number in range(150):
            await store.put([(f"{number}.{part}.{longest}", longest.encode()) for part in range(80)], 5.0)
        held_bytes = sum(client.memory_usage(key) for key in client.scan_iter("{tailrace:explain}*"))
        writer.write_histories([history_row("after")])
        newest = await store.get(f"149.79.{longest}", 5.0)
        oldest = await store.get(f"0.0.{longest}", 5.0)
        client.config_set("maxmemory", 0)
    await store.close()

    assert budget_bytes / 3 < held_bytes <= budget_bytes
    assert (newest, oldest) == (longest.encode(), None)
