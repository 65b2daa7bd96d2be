"""Redis with a password and TLS: a real Valkey that requires both, accessed through Feast."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import redis
import trustme
from redis.backoff import NoBackoff
from redis.retry import Retry

from infra.local.binaries import valkey_command
from infra.local.servers.access import prepare_valkey, valkey_access_file
from infra.local.supervisor.probes import answers_redis
from services.errors import ConfigError, DependencyUnavailable
from services.features.erasing import ErasingWriter, FileRewrite
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress, apply_repo
from services.features.writer import FeatureWriter
from services.settings.addresses import RedisAddress
from services.settings.redis_clients import client_options
from services.settings.settings import Settings
from tests.support.gateway.rows import declare_whole, history_row
from tests.support.gateway.tls_proxy import tls_proxy
from tests.support.servers import HOST, Server
from tests.support.wait import wait_for

PASSWORD = "p=1,\\u00e9#{}:/@7"
"""Characters that could break a connection string or a configuration file."""


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Settings with a password, for a named user unless a test chooses another."""
    (tmp_path / "password").write_text(PASSWORD + "\n")
    username = getattr(request, "param", "tailrace")
    return Settings(state_dir=tmp_path / "s", redis_username=username, redis_password_file=tmp_path / "password")


@pytest.fixture
def valkey(settings: Settings) -> Iterator[Server]:
    """A Valkey configured like the embedded one."""
    prepare_valkey(settings)
    folder, access = settings.state_dir / "valkey", valkey_access_file(settings)
    with Server(lambda port: valkey_command(port, folder, access=access), folder / "valkey.log") as server:
        yield server


@pytest.fixture
def address(settings: Settings, valkey: Server) -> RedisAddress:
    return replace(settings.redis_address, host=HOST, port=valkey.port)


@pytest.fixture
def secured(address: RedisAddress, tmp_path: Path) -> Iterator[RedisAddress]:
    """The address with TLS."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca, of=redis.pem")
    with tls_proxy(tmp_path / "proxy", ca, address.port) as proxy:
        yield replace(address, port=proxy.port, tls_ca_file=tmp_path / "ca, of=redis.pem")


def repo(address: RedisAddress, folder: Path) -> RepoAddress:
    """Apply a feature repository."""
    made = RepoAddress(folder, address, socket_timeout_s=1.0)
    apply_repo(made)
    with redis.Redis(**client_options(address)) as client:
        declare_whole(client)
    return made


async def test_features_are_written_and_read_over_tls_with_a_password(secured: RedisAddress, tmp_path: Path) -> None:
    """The gateway's reader returns what the worker's writer wrote."""
    made = repo(secured, tmp_path / "f")
    reader = FeatureReader(made, num_partitions=1)
    FeatureWriter(made).write_histories([history_row("u", ("a", "b"))])

    features = await reader.read("u", "v1", 2.0)
    await reader.close()

    assert features.history_item_ids == ("a", "b")


async def test_a_wrong_password_or_another_authority_is_an_unavailable_store(
    secured: RedisAddress, tmp_path: Path
) -> None:
    """Clients without the password are refused, and a server without a certificate of our authority is not used."""
    (tmp_path / "wrong").write_text("wrong")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    strangers = [
        replace(secured, password_file=tmp_path / "wrong"),
        replace(secured, password_file=None, username=""),
        replace(secured, tls_ca_file=tmp_path / "other.pem"),
        replace(secured, tls_ca_file=None),
    ]

    made = repo(secured, tmp_path / "f")
    for stranger in strangers:
        writer = FeatureWriter(replace(made, redis=stranger))
        with pytest.raises(DependencyUnavailable) as refused:
            writer.write_histories([history_row("u", ("a", "b"))])
        assert "wrong" not in str(refused.value.__cause__)


def test_the_password_is_in_no_file_argument_or_repr(
    settings: Settings, valkey: Server, address: RedisAddress, tmp_path: Path
) -> None:
    """Only its own file and Valkey's file hold the password, and other users cannot read them."""
    made = repo(address, tmp_path / "f")
    FeatureWriter(made).write_histories([history_row("u", ("a", "b"))])

    arguments = [
        word for process in psutil.process_iter() if process.name().startswith("valkey") for word in process.cmdline()
    ]
    access = valkey_access_file(settings)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    assert any(str(valkey.port) in word for word in arguments)
    assert not [word for word in arguments if PASSWORD in word]
    assert set(files) == {settings.redis_password_file, access}
    assert access.stat().st_mode & 0o077 == 0
    assert PASSWORD not in repr((settings, address, made)) + str(settings.as_environment())


@pytest.mark.parametrize("settings", ["", "tailrace"], indirect=True)
def test_only_the_one_user_is_accepted(address: RedisAddress) -> None:
    """The clients' options are accepted, an anonymous client is refused; the supervisor's probe needs no password."""
    assert answers_redis(HOST, address.port)
    with redis.Redis(**client_options(address)) as client:
        assert client.ping()
    with (
        redis.Redis(host=HOST, port=address.port, retry=Retry(NoBackoff(), 0)) as anonymous,
        pytest.raises(redis.AuthenticationError, match="Authentication required"),
    ):
        anonymous.ping()


def test_a_refused_rewrite_of_the_file_is_not_a_done_rewrite(
    settings: Settings, address: RedisAddress, tmp_path: Path
) -> None:
    """A user without the command is refused; with it, the rewrite runs and ends; without a file there is none."""
    erasing = ErasingWriter(repo(address, tmp_path / "f"))
    begun = erasing.begin_rewrite()
    wait_for(lambda: erasing.rewrite_state() is FileRewrite.DONE, what="the end of the rewrite")
    with redis.Redis(**client_options(address)) as client:
        client.execute_command("ACL", "SETUSER", settings.redis_username, "-bgrewriteaof")
        refused = erasing.begin_rewrite()
        client.config_set("appendonly", "no")
    without = erasing.begin_rewrite()
    erasing.close()

    assert (begun, refused, without) == (FileRewrite.RUNNING, FileRewrite.REFUSED, FileRewrite.NO_FILE)


def test_a_rewrite_begins_after_the_end_of_another(address: RedisAddress, tmp_path: Path) -> None:
    """A running rewrite's file may hold data that was removed since it began: the state is busy, not refused."""
    erasing = ErasingWriter(repo(address, tmp_path / "f"))
    with redis.Redis(**client_options(address)) as client:
        client.set("removed", "user")
        client.config_set("rdb-key-save-delay", 500_000)
        begun = [erasing.begin_rewrite()]
        client.config_set("rdb-key-save-delay", 0)
        client.delete("removed")
        begun.append(erasing.begin_rewrite())
        wait_for(lambda: erasing.begin_rewrite() is FileRewrite.RUNNING, what="the next rewrite")
    wait_for(lambda: erasing.rewrite_state() is FileRewrite.DONE, what="its end")
    erasing.close()

    assert begun == [FileRewrite.RUNNING, FileRewrite.BUSY]


@pytest.mark.parametrize("password", ["", None])
def test_an_empty_or_missing_password_file_is_refused(tmp_path: Path, password: str | None) -> None:
    """An empty or missing password file is reported with its path before a client connects."""
    path = tmp_path / "password"
    if password is not None:
        path.write_text(password)

    with pytest.raises(ConfigError, match=str(path)):
        client_options(RedisAddress(password_file=path))
