"""Every Redis client during a password rotation and a failover: real Valkeys behind one address."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from redis import Redis, RedisError

from benchmarks.faults.store import fail_over, follow, rotate_password
from benchmarks.faults.tcp_proxy import TcpProxy
from infra.local.servers.access import prepare_valkey
from services.errors import DependencyUnavailable, ReplicaOnly
from services.features.erasing import ErasingWriter, RedisReceipts
from services.features.explanations import RedisExplanations
from services.features.page_key import RedisPageKey
from services.features.rate_counts import RedisRateCounts
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress, apply_repo
from services.features.schema import PrecomputedRow
from services.features.shown import ShownWriter
from services.features.user_data import UserStore
from services.features.writer import FeatureWriter
from services.gateway.access.rates import Allowance
from services.gateway.access.shared_rates import Ask
from services.settings.addresses import RedisAddress
from services.settings.redis_clients import open_async_redis
from services.settings.settings import Settings
from tests.support.gateway.rows import declare_whole, history_row
from tests.support.pages import ROOT
from tests.support.servers import HOST, Server, free_port, valkey_server
from tests.support.wait import until_answer, wait_for

TIMEOUT_S = 5.0
LISTED = PrecomputedRow(user_id="u", item_ids=("x",), scores=(0.5,), bundle_version="v1", made_from_row_us=7)
Call = Callable[[], Awaitable[Any]]


@dataclass
class Pair:
    """A primary, its replica, and the address, which leads to the primary."""

    primary: Server
    replica: Server
    door: TcpProxy
    address: RedisAddress

    def admin(self, server: Server) -> Any:
        return Redis(host=HOST, port=server.port, password="one")

    def fail_over(self) -> None:
        """Promote the replica, and make the old primary its replica without closing connections."""
        with self.admin(self.primary) as old, self.admin(self.replica) as new:
            new.replicaof("NO", "ONE")
            old.replicaof(HOST, self.replica.port)
            wait_for(
                lambda: old.info("replication")["master_link_status"] == "up", what="the old primary's replication"
            )


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Two Valkeys with the password `one` for all tests."""
    both = valkey_server(tmp_path_factory.mktemp("one")), valkey_server(tmp_path_factory.mktemp("two"))
    for server in both:
        server.start()
        with Redis(host=HOST, port=server.port) as client:
            client.config_set("masterauth", "one")
            client.config_set("requirepass", "one")
    yield both
    for server in both:
        server.kill()


@pytest_asyncio.fixture
async def pair(servers: tuple[Server, Server], tmp_path: Path) -> AsyncIterator[Pair]:
    """The second Valkey replicates the first, which holds one user's features."""
    first, second = servers
    (tmp_path / "password").write_text("one")
    async with TcpProxy(HOST, free_port(), first.port) as door:
        address = RedisAddress(host=HOST, port=door.port, password_file=tmp_path / "password")
        made = Pair(first, second, door, address)
        with made.admin(first) as primary, made.admin(second) as replica:
            primary.replicaof("NO", "ONE")
            primary.flushall()
            declare_whole(primary)
            repo = repo_of(made, tmp_path)
            await asyncio.to_thread(apply_repo, repo)
            await asyncio.to_thread(FeatureWriter(repo).write_histories, [history_row("u", ("a", "b"))])
            replica.replicaof(HOST, first.port)
            wait_for(lambda: replica.info("replication")["master_link_status"] == "up", what="the replica")
            wait_for(lambda: replica.dbsize() == primary.dbsize(), what="the replicated rows")
        yield made


def repo_of(pair: Pair, folder: Path) -> RepoAddress:
    return RepoAddress(folder / "f", pair.address, socket_timeout_s=2.0)


@asynccontextmanager
async def clients(pair: Pair, folder: Path) -> AsyncIterator[dict[str, Call]]:
    """Provide a call of each of the platform's connected clients."""
    repo = repo_of(pair, folder)
    reader, receipts = FeatureReader(repo, num_partitions=8), RedisReceipts(pair.address)
    page_key, explanations = RedisPageKey(pair.address), RedisExplanations(pair.address, 60, 1_000_000)
    rates, writer, shown = RedisRateCounts(pair.address, is_peer=True), FeatureWriter(repo), ShownWriter(repo)
    erasing, user_data = ErasingWriter(repo), UserStore(repo)
    ask = Ask(cost=1, batch=1, spent=0, unspent=0, taken_on="")

    def blocking(function: Callable[..., Any], *arguments: Any) -> Call:
        return lambda: asyncio.to_thread(function, *arguments)

    calls: dict[str, Call] = {
        "features reader": lambda: reader.read("u", "v1", TIMEOUT_S),
        "features writer": blocking(writer.partitions.claim, 0),
        "lists by Feast": blocking(writer.write_precomputed, [LISTED], 9_000_000),
        "impressions": blocking(shown.partitions.claim, 0),
        "explanations": lambda: explanations.put([("r", b"x")], TIMEOUT_S),
        "page key": lambda: page_key.get(None, TIMEOUT_S),
        "rates": lambda: rates.ask("k", Allowance(rate_per_s=5, burst=5), ask, TIMEOUT_S),
        "receipts": lambda: receipts.open("e", 1, TIMEOUT_S),
        "erasing": blocking(erasing.remove_lists, ["u"], ["v1"]),
        "user data": blocking(user_data.history, "u"),
    }
    for call in calls.values():
        await call()
    yield calls
    for client in (reader, receipts, page_key, explanations, rates):
        await client.close()


async def test_each_client_uses_the_password_that_its_file_holds_when_it_connects(pair: Pair, tmp_path: Path) -> None:
    """After the password changes and every connection ends, clients reconnect without being recreated."""
    async with clients(pair, tmp_path) as calls:
        with pair.admin(pair.primary) as admin:
            admin.config_set("requirepass", "two")
            await asyncio.to_thread((tmp_path / "password").write_text, "two\n")
            admin.client_kill_filter(_type="normal", skipme=True)
            failed = {}
            for name, call in calls.items():
                for _ in range(2):  # the first call may find its connection cut
                    try:
                        await call()
                        failed.pop(name, None)
                        break
                    except DependencyUnavailable as error:
                        failed[name] = repr(error.__cause__)
            admin.config_set("requirepass", "one")

    assert failed == {}


async def test_the_documented_permissions_suffice(pair: Pair, tmp_path: Path) -> None:
    """A user with the permissions in docs/access.md can run every client."""
    rights = "~* +@all -@admin -@dangerous"
    with pair.admin(pair.primary) as admin:
        admin.execute_command("ACL", "SETUSER", "tailrace", "on", ">one", *rights.split())
    restricted = replace(pair, address=replace(pair.address, username="tailrace"))

    async with clients(restricted, tmp_path):
        pass  # each client has made a call by now

    assert rights in (ROOT / "docs/access.md").read_text()


async def test_a_wrong_or_missing_password_is_named(pair: Pair, tmp_path: Path) -> None:
    """A client with an invalid or missing file reports it, and works again once the file is fixed."""
    writer = FeatureWriter(repo_of(pair, tmp_path))
    file = tmp_path / "password"
    for change, why in ((lambda: file.write_text("wrong"), "password"), (file.unlink, str(file))):
        change()
        with pytest.raises(DependencyUnavailable) as refused:
            await asyncio.to_thread(writer.partitions.claim, 0)
        assert why in refused.value.why

    file.write_text("one")
    assert await asyncio.to_thread(writer.partitions.claim, 0) is not None


async def test_each_client_follows_a_failover_whose_old_primary_lives_on(pair: Pair, tmp_path: Path) -> None:
    """The old primary keeps connections, refuses writes and serves stale reads; each client finds the new primary."""
    async with clients(pair, tmp_path) as calls:
        await asyncio.to_thread(pair.fail_over)
        await asyncio.sleep(1.1)  # a connection asks for its server's role once a second
        refused = {name: await outcome(call) for name, call in calls.items()}
        pair.door.lead_to(pair.replica.port)
        back = {name: await outcome(call) for name, call in calls.items()}

    assert set(refused.values()) == {"ReplicaOnly"}, refused
    assert set(back.values()) == {""}, back


async def test_a_reader_without_traffic_to_write_does_not_go_stale(pair: Pair, tmp_path: Path) -> None:
    """A second after the failover reads use the new primary, though the old connection was never closed."""
    reader = FeatureReader(repo_of(pair, tmp_path), num_partitions=8)
    await reader.read("u", "v1", TIMEOUT_S)
    await asyncio.to_thread(pair.fail_over)
    with pair.admin(pair.primary) as old:
        old.replicaof("NO", "ONE")  # the row below does not reach it
        old.replicaof(HOST, 1)
    pair.door.lead_to(pair.replica.port)
    direct = replace(repo_of(pair, tmp_path), redis=replace(pair.address, port=pair.replica.port))
    await asyncio.to_thread(FeatureWriter(direct).write_histories, [history_row("u", ("c",), row_time_us=9_000_000)])

    await until_answer(
        lambda: reader.read("u", "v1", TIMEOUT_S),
        lambda features: features.history_item_ids == ("c",),
        passing=ReplicaOnly,
    )
    await reader.close()


async def outcome(call: Call) -> str:
    """Return the name of the error that a call ends with; empty on success."""
    try:
        await call()
    except (ReplicaOnly, DependencyUnavailable) as error:
        return type(error).__name__
    return ""


async def test_the_faults_of_the_matrix_are_what_they_say(pair: Pair, tmp_path: Path) -> None:
    """The failover leaves the old primary behind the address until `follow`; the rotation writes its password file."""
    settings = Settings(state_dir=tmp_path / "s", redis_password_file=pair.address.password_file)
    prepare_valkey(settings)
    async with AsyncExitStack() as closing:
        scene: Any = SimpleNamespace(settings=settings, wires={"store": pair.door}, promoted=[], closing=closing)
        await fail_over(scene)
        client = open_async_redis(pair.address, TIMEOUT_S, retries=False)
        assert await outcome_of(client.ping()) == "ReadOnlyError"
        await follow(scene)
        assert await outcome_of(client.set("a", "b")) == ""
        await rotate_password(scene)
        await outcome_of(client.ping())  # its connection was cut
        assert await outcome_of(client.ping()) == ""
        await client.aclose()


async def outcome_of(call: Awaitable[Any]) -> str:
    """Return the name of redis-py's error; empty on success."""
    try:
        await call
    except RedisError as error:
        return type(error).__name__
    return ""
