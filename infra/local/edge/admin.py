"""Talks to a running edge through its admin socket: asks whether it is well, and swaps certificates under open connections.

Connections that stand keep the certificate that they were made with; new ones get the new one.
"""

import os
import socket
from pathlib import Path

from infra.local.edge.config import ADMIN_SOCKET, EdgePlan
from services.errors import ConfigError

TIMEOUT_S = 2.0


def edge_answers(folder: Path) -> bool:
    """Whether the edge in this folder answers a question."""
    try:
        return ask(folder, "show info").startswith("Name: HAProxy")
    except OSError:
        return False


def swap_certificates(folder: Path, plan: EdgePlan) -> None:
    """Have the edge use what is in the files now. Raises ConfigError, and then it goes on with what it had."""
    chain = plan.certificate.read_text().strip() + "\n" + plan.key.read_text().strip()
    _swap(folder, "cert", plan.certificate, chain)
    if plan.client_ca_file is not None:
        _swap(folder, "ca-file", plan.client_ca_file, plan.client_ca_file.read_text().strip())


def ask(folder: Path, command: str) -> str:
    """Send one command and give the answer. Raises OSError when nobody answers.

    Reaches the socket through the folder's descriptor, because a Unix socket's path has room for 107 characters only.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(TIMEOUT_S)
            line.connect(f"/proc/self/fd/{opened}/{ADMIN_SOCKET}")
            line.sendall(command.encode() + b"\n")
            answer = b""
            while chunk := line.recv(65_536):
                answer += chunk
    finally:
        os.close(opened)
    return answer.decode(errors="replace").strip()


def _swap(folder: Path, kind: str, path: Path, pem: str) -> None:
    name = str(path.absolute()).replace("\\", "\\\\").replace(" ", "\\ ")
    lines = "\n".join(line for line in pem.splitlines() if line.strip())
    set_answer = ask(folder, f"set ssl {kind} {name} <<\n{lines}\n")
    if "ransaction" in set_answer:
        commit_answer = ask(folder, f"commit ssl {kind} {name}")
        if "Success" in commit_answer:
            return
        ask(folder, f"abort ssl {kind} {name}")
        set_answer = commit_answer
    raise ConfigError(f"{path}: the edge refuses it: {set_answer.splitlines()[-1] if set_answer else 'no answer'}")
