"""How Ray's HAProxy is judged by what it says of itself: `pytest tests/unit/infra/test_main_door.py`."""

import socket
from pathlib import Path

import pytest

from infra.local.edge.config import ADMIN_SOCKET
from infra.local.standby.handover import Main
from infra.local.standby.main_door import judge, look

HEAD = "# pxname,svname,status,act,bck\n"
REST, RPC = "http-tailrace,SERVE_REPLICA-1", "grpc-tailrace,SERVE_REPLICA-1"
NO_GATEWAY = (
    "http_frontend,FRONTEND,OPEN,,\n"
    "http-tailrace,SERVE_PROXY_ACTOR-fallback-64,UP,0,1\n"
    "http-tailrace,BACKEND,UP,0,1\n"
    "grpc_fallback_backend,SERVE_PROXY_ACTOR-fallback-64,UP 1/2,1,0\n"
    "stats,BACKEND,UP,0,0\n"
)


@pytest.mark.parametrize(
    ("servers", "main"),
    [
        ("", Main.UNWELL),
        (f"{REST},UP,1,0\n{RPC},UP,1,0\n", Main.WELL),
        (f"{REST},UP 1/2,1,0\n{RPC},no check,1,0\n", Main.WELL),
        (f"{REST},DOWN,1,0\n{REST[:-1]}2,UP,1,0\n{RPC},UP,1,0\n", Main.WELL),
        (f"{REST},DOWN,1,0\n{RPC},UP,1,0\n", Main.UNWELL),
        (f"{REST},DOWN 1/2,1,0\n{RPC},MAINT,1,0\n", Main.UNWELL),
    ],
)
def test_well_means_a_gateway_behind_each_door(servers: str, main: Main) -> None:
    """The fallback, which holds requests until there is a gateway again, is none."""
    assert judge(HEAD + NO_GATEWAY + servers) is main


def test_nonsense_is_unwell() -> None:
    """An answer that is cut short is no good look."""
    assert judge("") is Main.UNWELL


def test_nobody_at_the_admin_socket_is_gone(tmp_path: Path) -> None:
    """No folder, or the socket of a process that was killed."""
    assert look(tmp_path / "none") is Main.GONE
    (tmp_path / "node").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "node" / ADMIN_SOCKET))

    assert look(tmp_path) is Main.GONE
