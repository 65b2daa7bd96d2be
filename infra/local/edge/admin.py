"""Client of a running edge's admin socket: its health, that of the servers behind it, and new certificates.

Open connections keep the certificate that they were made with; new ones get the new one.
"""

import csv
import io
import os
import re
import socket
from pathlib import Path

from infra.local.edge.config import ADMIN_SOCKET, IN_FLIGHT_TABLE, RAY_SERVER, EdgePlan
from services.errors import ConfigError

TIMEOUT_S = 2.0


def edge_answers(folder: Path) -> bool:
    """Return whether the edge in this folder answers."""
    try:
        return send(folder, "show info").startswith("Name: HAProxy")
    except OSError:
        return False


def ray_is_up(folder: Path) -> bool | None:
    """Return whether each door has a server of Ray's that passes its checks; None before the first check has ended."""
    try:
        stat = send(folder, "show stat")
    except OSError:
        return None
    return judge(stat)


def judge(stat: str) -> bool | None:
    """Read the table of `show stat` (CSV) as `ray_is_up`."""
    is_up: dict[str, bool] = {}
    for row in csv.DictReader(io.StringIO(stat.removeprefix("# "))):
        if row["svname"].startswith(RAY_SERVER):
            if row["check_status"] == "INI":
                return None
            is_up[row["pxname"]] = is_up.get(row["pxname"], False) or row["status"].startswith("UP")
    return all(is_up.values()) if is_up else None


def num_refused(folder: Path) -> int | None:
    """Return how many requests HAProxy has refused since it started because too many were in flight; None when nothing answers."""
    try:
        found = re.findall(r"gpc0=(\d+)", send(folder, f"show table {IN_FLIGHT_TABLE}"))
    except OSError:
        return None
    return sum(map(int, found))


def swap_certificates(folder: Path, plan: EdgePlan) -> None:
    """Load the certificate files again. Raises ConfigError when HAProxy refuses them, which keeps the old ones."""
    if plan.certificate is None or plan.key is None:
        return
    chain = plan.certificate.read_text().strip() + "\n" + plan.key.read_text().strip()
    _swap(folder, "cert", plan.certificate, chain)
    if plan.client_ca_file is not None:
        _swap(folder, "ca-file", plan.client_ca_file, plan.client_ca_file.read_text().strip())


def send(folder: Path, command: str) -> str:
    """Send one command and return the answer. Raises OSError when nothing answers.

    Reaches the socket through the folder's descriptor, because a Unix socket's path has room for 107 characters only.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(TIMEOUT_S)
            client.connect(f"/proc/self/fd/{opened}/{ADMIN_SOCKET}")
            client.sendall(command.encode() + b"\n")
            answer = b""
            while chunk := client.recv(65_536):
                answer += chunk
    finally:
        os.close(opened)
    return answer.decode(errors="replace").strip()


def _swap(folder: Path, kind: str, path: Path, pem: str) -> None:
    name = str(path.absolute()).replace("\\", "\\\\").replace(" ", "\\ ")
    lines = "\n".join(line for line in pem.splitlines() if line.strip())
    set_answer = send(folder, f"set ssl {kind} {name} <<\n{lines}\n")
    if "ransaction" in set_answer:
        commit_answer = send(folder, f"commit ssl {kind} {name}")
        if "Success" in commit_answer:
            return
        send(folder, f"abort ssl {kind} {name}")
        set_answer = commit_answer
    raise ConfigError(f"{path}: the edge refuses it: {set_answer.splitlines()[-1] if set_answer else 'no answer'}")
