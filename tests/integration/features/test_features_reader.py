"""The feature store over a real Valkey."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from redis import Redis

from services.contracts.features import PrecomputedList, UserFeatures
from services.errors import DependencyUnavailable, EnvironmentFault
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress, open_store
from services.features.schema import (
    SERVICE,
    LogPosition,
    PopularRow,
    PopularWindow,
    PrecomputedRow,
    user_features,
)
from services.features.writer import FeatureWriter
from services.router.policy import list_is_fresh
from services.settings.addresses import RedisAddress
from services.stream.aggregate import HistoryLimits, LoggedEvent, apply
from tests.support.gateway.rows import history_row
from tests.support.servers import HOST, Server
from tests.support.wait import until, until_answer

TIMEOUT_S = 10.0


@pytest_asyncio.fixture
async def reader(features: RepoAddress) -> AsyncIterator[FeatureReader]:
    """A reader on the fresh store."""
    reader = FeatureReader(features, num_partitions=2)
    yield reader
    await reader.close()


async def test_a_read_is_one_exchange_and_notices_an_emptied_store(
    features: RepoAddress, reader: FeatureReader, valkey: Server
) -> None:
    """A read asks Redis once and agrees with Feast; after Redis is emptied it reports unavailable features."""
    writer = FeatureWriter(features)
    writer.write_histories([history_row("u", ("a", "ü"), row_time_us=2_000_000)])
    listed = PrecomputedRow(user_id="u", item_ids=("x",), scores=(0.5,), bundle_version="v1", made_from_row_us=7)
    writer.write_precomputed([listed], made_at_us=9_000_000)
    users = ("u", "nobody")
    for user_id in users:
        await reader.read(user_id, "v1", TIMEOUT_S)  # connects
    entities = [{"user_id": user_id, "bundle_version": "v1"} for user_id in users]
    store = open_store(features)

    response = await store.get_online_features_async(store.get_feature_service(SERVICE), entities)
    with Redis(host=HOST, port=valkey.port) as client:
        before = int(client.info("stats")["total_reads_processed"])
        read = [await reader.read(user_id, "v1", TIMEOUT_S) for user_id in users]
        num_exchanges = int(client.info("stats")["total_reads_processed"]) - before - 1
        client.flushall()
    client = await store.provider.online_store._get_client_async(store.config.online_store)
    await client.aclose()

    by_name = response.to_dict()
    rows = [{name: values[number] for name, values in by_name.items()} for number in range(2)]
    assert read == [user_features(row, at_s) for row, at_s in zip(rows, (9, None), strict=True)]
    assert read[0] == UserFeatures(
        history_item_ids=("a", "ü"),
        newest_event_time_ms=2_000,
        num_events=2,
        as_of_us=2_000_000,
        precomputed=PrecomputedList(
            item_ids=("x",), scores=(0.5,), bundle_version="v1", made_from_row_us=7, made_at_s=9
        ),
    )
    assert num_exchanges == 2
    for user_id in users:
        with pytest.raises(DependencyUnavailable):
            await reader.read(user_id, "v1", TIMEOUT_S)


async def test_each_bundle_has_its_own_lists_until_it_is_removed(features: RepoAddress, reader: FeatureReader) -> None:
    """A later bundle's lists do not change the live bundle's; a rollback finds its own, removed bundles leave none."""
    writer = FeatureWriter(features)
    writer.write_histories([history_row("u", ("a",))])
    for made_at_us, version in enumerate(("v1", "v2", "v3"), 1):
        row = PrecomputedRow(
            user_id="u", item_ids=(f"of-{version}",), scores=(1.0,), bundle_version=version, made_from_row_us=1
        )
        writer.write_precomputed([row], made_at_us)

    async def shown(version: str) -> tuple[str, ...] | None:
        """Return the items of the list that a gateway with this bundle reads."""
        stored = (await reader.read("u", version, TIMEOUT_S)).precomputed
        return None if stored is None else stored.item_ids

    assert [await shown(version) for version in ("v1", "v2", "v3")] == [("of-v1",), ("of-v2",), ("of-v3",)]
    assert writer.remove_precomputed({"v1", "v3"}) == 1
    assert [await shown(version) for version in ("v1", "v2", "v3")] == [("of-v1",), None, ("of-v3",)]
    assert await reader.sample_user_ids(10, TIMEOUT_S) == ["u"]


@pytest.mark.parametrize("event_time_ms", [500, 1_000, 4_070_908_800_000])
async def test_any_event_makes_a_list_stale(features: RepoAddress, reader: FeatureReader, event_time_ms: int) -> None:
    """A late event, an event at the newest time, one of the year 2099, and a later event each make the list stale."""
    writer = FeatureWriter(features)
    before = history_row("u", ("a",), row_time_us=1_000_000)
    for offset, time_ms in ((8, event_time_ms), (9, 2_000)):
        listed = PrecomputedRow(
            user_id="u", item_ids=("x",), scores=(1.0,), bundle_version="v1", made_from_row_us=before.row_time_us
        )
        writer.write_histories([before])
        writer.write_precomputed([listed], made_at_us=offset)
        fresh = await reader.read("u", "v1", TIMEOUT_S)
        event = LoggedEvent("u", "b", f"id-{offset}", time_ms * 1_000, LogPosition("t", 1, offset))
        after = apply(before, [event], HistoryLimits(10)).row
        assert after is not None
        writer.write_histories([after])
        moved = await reader.read("u", "v1", TIMEOUT_S)

        assert [_is_fresh(features) for features in (fresh, moved)] == [True, False]
        before = after


def _is_fresh(features: UserFeatures) -> bool:
    assert features.precomputed is not None
    return list_is_fresh(features.precomputed, row_us=features.as_of_us, has_recent_items=False)


def test_row_is_replaced_only_by_a_later_one(features: RepoAddress) -> None:
    """The store drops a row of an equal or older time; one microsecond more is enough."""
    writer = FeatureWriter(features)
    writer.write_histories([history_row("u", ("a", "b"), row_time_us=1_000_001)])
    writer.write_histories([history_row("u", ("old",), row_time_us=1_000_001)])
    kept = writer.read_histories(["u"])["u"].item_ids
    writer.write_histories([history_row("u", ("new",), row_time_us=1_000_002)])

    assert kept == ("a", "b")
    assert writer.read_histories(["u"])["u"].item_ids == ("new",)


async def test_reads_fail_without_the_store_and_recover_with_it(
    features: RepoAddress, reader: FeatureReader, valkey: Server
) -> None:
    """An unavailable Redis raises DependencyUnavailable each time; afterwards the same reader answers again."""
    FeatureWriter(features).write_histories([history_row("u", ("a",))])
    await reader.read("u", "v1", TIMEOUT_S)
    valkey.kill()

    for _ in range(5):
        with pytest.raises(DependencyUnavailable):
            await reader.read("u", "v1", 0.2)
    with pytest.raises(DependencyUnavailable):
        await reader.sample_user_ids(5, 0.2)
    valkey.start()
    recovered = await _read_when_back(reader, "u")

    assert recovered.history_item_ids == ("a",)


async def test_frozen_store_piles_nothing_up_and_answers_are_not_mixed(
    features: RepoAddress, reader: FeatureReader, valkey: Server
) -> None:
    """Reads that timed out while Redis hangs end when it is back, and their late replies reach no other user."""
    users = [f"u{number}" for number in range(20)]
    FeatureWriter(features).write_histories([history_row(user, (user,)) for user in users])
    await asyncio.gather(*(reader.read(user, "v1", TIMEOUT_S) for user in users))
    valkey.freeze()

    results = await asyncio.gather(*(reader.read(user, "v1", 0.05) for user in users * 5), return_exceptions=True)
    valkey.thaw()
    await _read_when_back(reader, "u0")
    await until(lambda: len(asyncio.all_tasks()) == 1)
    reads = await asyncio.gather(*(reader.read(user, "v1", TIMEOUT_S) for user in users))

    assert all(isinstance(result, DependencyUnavailable) for result in results)
    assert [features.history_item_ids for features in reads] == [(user,) for user in users]


async def test_a_store_that_does_not_reply_opens_the_breaker(reader: FeatureReader, valkey: Server) -> None:
    """After some reads without a reply the breaker opens, and further reads fail at once."""
    await reader.read("u", "v1", TIMEOUT_S)
    valkey.freeze()
    give_up_s = time.monotonic() + 60

    error: BaseException | None = TimeoutError()
    while error is not None:
        assert time.monotonic() < give_up_s
        with pytest.raises(DependencyUnavailable) as away:
            await reader.read("u", "v1", 0.05)
        error = away.value.__cause__
    valkey.thaw()


async def test_a_read_ends_within_its_timeout(reader: FeatureReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timed-out read ends even if the client ignores its cancellation."""
    let_go = asyncio.Event()

    async def stubborn(*_: object) -> None:
        """Read, ignoring cancellation."""
        while not let_go.is_set():
            with suppress(asyncio.CancelledError):
                await let_go.wait()

    monkeypatch.setattr(reader, "_read_rows", stubborn)
    started_s = time.monotonic()
    with pytest.raises(DependencyUnavailable):
        await reader.read("u", "v1", 0.05)
    took_s = time.monotonic() - started_s
    let_go.set()
    await until(lambda: len(asyncio.all_tasks()) == 1)

    assert took_s < 5


async def test_callers_without_time_do_not_open_the_breaker(reader: FeatureReader, valkey: Server) -> None:
    """Timeouts of a millisecond do not count as failures of the store."""
    await reader.read("u", "v1", TIMEOUT_S)
    valkey.freeze()
    for _ in range(10):
        with pytest.raises(DependencyUnavailable):
            await reader.read("u", "v1", 0.001)
    valkey.thaw()

    assert await reader.read("u", "v1", TIMEOUT_S) == UserFeatures()


@pytest.mark.parametrize("share", [0.9, 1.05, 4.0])
async def test_a_blocked_event_loop_is_no_failure_of_the_store(
    reader: FeatureReader, valkey: Server, share: float
) -> None:
    """Reads that end while the event loop was blocked for this share of their limit do not open the breaker."""
    await reader.read("u", "v1", TIMEOUT_S)
    valkey.freeze()
    reads = [asyncio.create_task(reader.read("u", "v1", 0.05)) for _ in range(5)]
    await asyncio.sleep(0)
    time.sleep(share * 0.05)  # noqa: ASYNC251 - the loop stands still
    given_up = await asyncio.gather(*reads, return_exceptions=True)
    valkey.thaw()

    assert all(isinstance(error, DependencyUnavailable) for error in given_up)
    assert await reader.read("u", "v1", TIMEOUT_S) == UserFeatures()


def test_reader_names_the_command_when_nothing_was_applied(tmp_path: Path) -> None:
    """Without a registry the reader names the command that makes one."""
    with pytest.raises(EnvironmentFault, match="tailrace pipeline"):
        FeatureReader(RepoAddress(tmp_path / "none", RedisAddress(host=HOST, port=1)), num_partitions=1)


async def test_users_are_found_by_their_keys(features: RepoAddress, reader: FeatureReader) -> None:
    """Every user ID is returned unchanged, with any characters, and no key belongs to another view."""
    user_ids = ("user*", "tail race", "ü[1]", "tailrace", "196")
    writer = FeatureWriter(features)
    writer.write_histories([history_row(user_id) for user_id in user_ids])
    windows = {name: PopularWindow(("a",), (1,)) for name in ("1h", "24h", "7d")}
    writer.partitions.claim(0)
    writer.write_popularity([PopularRow(partition=0, as_of_ms=1_000, windows=windows)])

    sampled = await reader.sample_user_ids(50, TIMEOUT_S)
    few = await reader.sample_user_ids(2, TIMEOUT_S)

    assert sorted(sampled) == sorted(user_ids)
    assert len(few) == 2


async def _read_when_back(reader: FeatureReader, user_id: str) -> UserFeatures:
    return await until_answer(lambda: reader.read(user_id, "v1", 0.2), lambda _: True, passing=DependencyUnavailable)
