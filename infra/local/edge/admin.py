"""Client of a running edge's admin socket: its health, the health of its servers, and new certificates.

As a command it drains one of Ray's nodes or returns it to service: `python -m infra.local.edge.admin out|in HOST`.

Open connections keep their certificate; new connections get the new certificate.
"""

import argparse
import csv
import io
import os
import re
import socket
from collections import Counter
from pathlib import Path

from infra.local.edge.config import (
    ADMIN_SOCKET,
    IN_FLIGHT_TABLE,
    KEY_SHARES,
    KEY_TENANTS,
    RAY_SERVER,
    TENANT_WEIGHTS,
    EdgePlan,
    edge_folder,
    share_of,
)
from services.contracts.tenant import TenantState
from services.errors import ConfigError
from services.gateway.access.keys import read_keys
from services.gateway.access.tenants import read_tenants
from services.settings.settings import ending_with_error, load_settings

TIMEOUT_S = 2.0
NUM_DOORS = 2


def edge_answers(folder: Path) -> bool:
    try:
        return send(folder, "show info").startswith("Name: HAProxy")
    except OSError:
        return False


def ray_is_up(folder: Path) -> bool | None:
    """Return whether each door has a Ray server that passes its checks; None before the first check has ended."""
    try:
        stat = send(folder, "show stat")
    except OSError:
        return None
    return has_ray_up(stat)


def num_ray_up(folder: Path) -> int:
    """Return how many of Ray's servers are in use and pass their checks at every door; 0 if nothing answers."""
    try:
        return count_up(send(folder, "show stat"))
    except OSError:
        return 0


def count_up(stat: str) -> int:
    """Read the table of `show stat` (CSV) as `num_ray_up`."""
    ups = Counter(row["svname"] for row in _table(stat) if row["status"].startswith("UP"))
    return sum(ups[name] == NUM_DOORS for name in ups if name.startswith(RAY_SERVER))


def use_ray_host(folder: Path, host: str, *, is_used: bool) -> None:
    """Take one of Ray's nodes out of service at both doors, or put it back. Its requests in progress continue.

    Raises ConfigError if no server has this address, and OSError if nothing answers.
    """
    servers = [
        f"{row['pxname']}/{row['svname']}"
        for row in _table(send(folder, "show stat"))
        if row["svname"].startswith(RAY_SERVER) and row["addr"].rpartition(":")[0].strip("[]") == host
    ]
    if not servers:
        raise ConfigError(f"{host}: unknown; give one of the edge's --ray-host")
    for server in servers:
        send(folder, f"set server {server} state {'ready' if is_used else 'drain'}")


def has_ray_up(stat: str) -> bool | None:
    """Read the table of `show stat` (CSV) as `ray_is_up`."""
    is_up: dict[str, bool] = {}
    for row in _table(stat):
        if row["svname"].startswith(RAY_SERVER):
            if row["check_status"] == "INI":
                return None
            is_up[row["pxname"]] = is_up.get(row["pxname"], False) or row["status"].startswith("UP")
    return all(is_up.values()) if is_up else None


def _table(stat: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(stat.removeprefix("# "))))


def num_refused(folder: Path) -> int | None:
    """Return HAProxy's count of requests refused for overload since its start; None without an answer."""
    try:
        counts = re.findall(r"gpc0=(\d+)", send(folder, f"show table {IN_FLIGHT_TABLE}"))
    except OSError:
        return None
    return sum(map(int, counts))


def swap_certificates(folder: Path, plan: EdgePlan) -> None:
    """Reload the certificate files. Raises ConfigError if HAProxy refuses them; the old certificates then stay."""
    if plan.certificate is None or plan.key is None:
        return
    chain = plan.certificate.read_text().strip() + "\n" + plan.key.read_text().strip()
    _swap(folder, "cert", plan.certificate, chain)
    if plan.client_ca_file is not None:
        _swap(folder, "ca-file", plan.client_ca_file, plan.client_ca_file.read_text().strip())


def send(folder: Path, command: str) -> str:
    """Send one command and return the answer. Raises OSError if nothing answers.

    Opens the socket through the folder's descriptor, because the path of a Unix socket is limited to 107 characters.
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


def write_maps(folder: Path, keys_file: Path, tenants_file: Path | None) -> dict[str, str]:
    """Write the part of the limit that each API key may use, its tenant, and the tenants' weights; return the lines.

    HAProxy reads hashes, never a key. Raises ConfigError if a file is invalid.
    """
    hashes = [(stored.sha256, key) for key in read_keys(keys_file).keys for stored in key.hashes]
    maps: dict[str, list[tuple[str, str | int]]] = {
        KEY_SHARES: [(sha256, share_of(key.priority)) for sha256, key in hashes]
    }
    if tenants_file is not None:
        tenants = read_tenants(tenants_file).tenants if tenants_file.exists() else ()
        active = [tenant for tenant in tenants if tenant.state is TenantState.ACTIVE]  # the others' calls are refused
        mean = sum(tenant.share for tenant in active) / max(1, len(active))
        maps[KEY_TENANTS] = [(sha256, key.tenant) for sha256, key in hashes if key.tenant]
        maps[TENANT_WEIGHTS] = [(tenant.id, max(1, round(100 * tenant.share / mean))) for tenant in active]
    lines = {name: "".join(f"{key} {value}\n" for key, value in rows) for name, rows in maps.items()}
    for name, text in lines.items():
        (folder / name).write_text(text)
    return lines


def swap_maps(folder: Path, keys_file: Path, tenants_file: Path | None) -> None:
    """Write the maps and pass them to the running HAProxy. Raises ConfigError, or OSError without an answer."""
    for name, lines in write_maps(folder, keys_file, tenants_file).items():
        answer = send(folder, f"prepare map {name}")
        version = answer.rpartition(" ")[2]
        if not version.isdecimal():
            raise ConfigError(f"{keys_file}: the edge refuses {name}: {answer}")
        if lines:
            send(folder, f"add map @{version} {name} <<\n{lines}")
        send(folder, f"commit map @{version} {name}")


@ending_with_error()
def main() -> None:
    """Take a node out of service, or put it back."""
    parser = argparse.ArgumentParser(prog="python -m infra.local.edge.admin", description="A node of Ray at the edge.")
    parser.add_argument("state", choices=("out", "in"), help="out of service, or in service again")
    parser.add_argument("host", help="as in the edge's --ray-host")
    options = parser.parse_args()
    state_dir = load_settings().state_dir
    try:
        use_ray_host(edge_folder(state_dir), options.host, is_used=options.state == "in")
    except OSError as error:
        problem = f"no edge answers in {state_dir} ({error.strerror or error})"
        raise ConfigError(f"TAILRACE_STATE_DIR: {problem}; run this on the front, with the edge's settings") from error


if __name__ == "__main__":
    main()
