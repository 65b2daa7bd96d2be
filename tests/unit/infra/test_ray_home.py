"""The folder of a stack's Ray."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers.ray_home import make_ray_home, ray_environment, ray_home, remove_ray_home
from services.settings.settings import Settings

MAX_SOCKET_PATH = 107
LONGEST_RAY_SOCKET = "session_2026-11-21_03-59-54_484199_4194304/sockets/plasma_store"
LONGEST_PROXY_SOCKET = f"{'f' * 56}/admin.sock.4194304.tmp"


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    """A state folder whose Ray folder is removed afterwards."""
    yield tmp_path
    remove_ray_home(tmp_path)


def test_socket_paths_fit(state_dir: Path) -> None:
    """However deep the state folder lies, Unix sockets in the Ray folder stay under the kernel's limit."""
    home = ray_home(state_dir / ("deep/" * 30))
    proxy = Path(ray_environment(home, Settings())["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent

    assert len(str(home / LONGEST_RAY_SOCKET)) <= MAX_SOCKET_PATH
    assert len(str(proxy / LONGEST_PROXY_SOCKET)) <= MAX_SOCKET_PATH


def test_the_folder_is_ours_alone_and_its_logs_are_kept(state_dir: Path) -> None:
    """Its mode is 700; a new start removes everything but moves the logs to the state folder."""
    home = make_ray_home(state_dir)
    logs = home / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker.err").write_text("why")

    again = make_ray_home(state_dir)

    assert again == home
    assert home.stat().st_mode & 0o777 == 0o700
    assert list(home.iterdir()) == []
    assert (state_dir / "logs" / "ray" / "worker.err").read_text() == "why"


def test_logs_that_cannot_be_copied_keep_no_stack_from_starting(state_dir: Path) -> None:
    """The folder is removed all the same, which may be what makes room on a full disk."""
    home = make_ray_home(state_dir)
    logs = home / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker.err").write_text("why")
    (state_dir / "logs").write_text("no folder")

    make_ray_home(state_dir)

    assert list(home.iterdir()) == []
