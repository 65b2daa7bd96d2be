"""How Ray's HAProxy is, asked at its admin socket: gone, without a gateway, or well.

The doors themselves cannot be asked while the standby shares them: which of the two would answer?
"""

import csv
import io
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from infra.local.edge.admin import ask
from infra.local.edge.config import ADMIN_SOCKET
from infra.local.standby.handover import Main

_NO_SERVERS = {"FRONTEND", "BACKEND"}
_FALLBACK = "-fallback-"


def look(folder: Path) -> Main:
    """Ask the HAProxy that has its admin socket below this folder. Blocks for at most two seconds."""
    try:
        stat = _ask(folder, "show stat")
    except OSError:
        return Main.UNWELL
    return Main.GONE if stat is None else judge(stat)


def end(folder: Path) -> None:
    """Kill the HAProxy, if it says who it is: who came to it waits in vain. Ray Serve starts another."""
    with suppress(OSError):
        named = re.search(r"^Pid: (\d+)$", _ask(folder, "show info") or "", re.MULTILINE)
        if named:
            os.kill(int(named[1]), signal.SIGKILL)


def _ask(folder: Path, command: str) -> str | None:
    """Return the answer of whoever listens in one of the folders, one per Ray that was started here. None: nobody does."""
    for admin in folder.glob(f"*/{ADMIN_SOCKET}"):
        with suppress(ConnectionRefusedError, FileNotFoundError):  # of a HAProxy that was killed
            return ask(admin.parent, command)
    return None


def judge(stat: str) -> Main:
    """Read `show stat` (CSV): well when each backend that has gateways has one that is up.

    Ray's fallback proxy, which holds requests until there is a gateway again, counts for nothing.
    """
    up: dict[str, bool] = {}
    for row in csv.DictReader(io.StringIO(stat.removeprefix("# "))):
        if row["svname"] not in _NO_SERVERS and _FALLBACK not in row["svname"]:
            up[row["pxname"]] = up.get(row["pxname"], False) or row["status"].startswith(("UP", "no check"))
    return Main.WELL if up and all(up.values()) else Main.UNWELL
