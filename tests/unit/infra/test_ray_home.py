"""The folder of a stack's Ray."""

from pathlib import Path

import pytest

from infra.local.servers.ray_home import make_ray_home, ray_environment, ray_home, remove_ray_home
from services.settings.settings import Settings

MAX_SOCKET_PATH = 107
LONGEST_RAY_SOCKET = "session_2026-11-21_03-59-54_484199_4194304/sockets/plasma_store"
LONGEST_PROXY_SOCKET = f"{'f' * 56}/admin.sock.4194304.tmp"


def test_socket_paths_fit(tmp_path: Path) -> None:
    """Unix sockets in the Ray folder stay under the kernel's path limit for any depth of the state folder."""
    home = ray_home(tmp_path / ("deep/" * 30))
    proxy = Path(ray_environment(home, Settings())["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent

    assert len(str(home / LONGEST_RAY_SOCKET)) <= MAX_SOCKET_PATH
    assert len(str(proxy / LONGEST_PROXY_SOCKET)) <= MAX_SOCKET_PATH


@pytest.mark.parametrize("logs_can_be_copied", [True, False])
def test_the_folder_is_ours_alone_and_its_logs_are_kept(tmp_path: Path, logs_can_be_copied: bool) -> None:
    """The folder has mode 700; a restart moves its logs to the state folder if possible and removes the rest."""
    home = make_ray_home(tmp_path)
    logs = home / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker.err").write_text("why")
    if not logs_can_be_copied:
        (tmp_path / "logs").write_text("no folder")

    again = make_ray_home(tmp_path)

    assert again == home
    assert home.stat().st_mode & 0o777 == 0o700
    assert list(home.iterdir()) == []
    assert not logs_can_be_copied or (tmp_path / "logs" / "ray" / "worker.err").read_text() == "why"
    remove_ray_home(tmp_path)
