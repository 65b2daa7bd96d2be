"""How Ray's HAProxy is, asked at its admin socket: gone, without a gateway, or well. Changes nothing.

The doors themselves cannot be asked while the standby shares them: which of the two would answer?
"""

import csv
import io
from pathlib import Path

from infra.local.edge_admin import ask
from infra.local.edge_config import ADMIN_SOCKET
from infra.local.handover import Main

_NO_SERVERS = {"FRONTEND", "BACKEND"}
_FALLBACK = "-fallback-"


def look(folder: Path) -> Main:
    """Ask the HAProxy that has its admin socket below this folder, in one of a folder per Ray that was started here.

    Blocks for at most two seconds.
    """
    for admin in folder.glob(f"*/{ADMIN_SOCKET}"):
        try:
            return judge(ask(admin.parent, "show stat"))
        except (ConnectionRefusedError, FileNotFoundError):
            continue  # of a HAProxy that was killed
        except OSError:
            return Main.UNWELL
    return Main.GONE


def judge(stat: str) -> Main:
    """Read `show stat` (CSV): well when each backend that has gateways has one that is up.

    Ray's fallback proxy, which holds requests until there is a gateway again, counts for nothing.
    """
    up: dict[str, bool] = {}
    for row in csv.DictReader(io.StringIO(stat.removeprefix("# "))):
        if row["svname"] not in _NO_SERVERS and _FALLBACK not in row["svname"]:
            up[row["pxname"]] = up.get(row["pxname"], False) or row["status"].startswith(("UP", "no check"))
    return Main.WELL if up and all(up.values()) else Main.UNWELL
