"""Writes for HAProxy which share of the limit each API key may use: the edge reads the keys' hashes, never a key.

The file is written before HAProxy starts and whenever the keys change; a running HAProxy gets the new table at once.
"""

from pathlib import Path

from infra.local.edge.admin import send
from infra.local.edge.config import KEY_SHARES, share_of
from services.errors import ConfigError
from services.gateway.access.keys import read_keys


def write_key_shares(folder: Path, keys_file: Path) -> str:
    """Write the file, and return its lines. Raises ConfigError if the keys file is invalid."""
    stored = read_keys(keys_file).keys
    lines = "".join(f"{one.sha256} {share_of(key.priority)}\n" for key in stored for one in key.hashes)
    (folder / KEY_SHARES).write_text(lines)
    return lines


def swap_key_shares(folder: Path, keys_file: Path) -> None:
    """Write the file and pass it to the running HAProxy. Raises ConfigError, or OSError if it does not answer."""
    lines = write_key_shares(folder, keys_file)
    answer = send(folder, f"prepare map {KEY_SHARES}")
    version = answer.rpartition(" ")[2]
    if not version.isdecimal():
        raise ConfigError(f"{keys_file}: the edge refuses its priorities: {answer}")
    if lines:
        send(folder, f"add map @{version} {KEY_SHARES} <<\n{lines}")
    send(folder, f"commit map @{version} {KEY_SHARES}")
