"""The session of a command: its console, the settings of its stack, and its line in the audit file.

The audit file of a state folder has one line of JSON per administrative command, including refused commands. The
gateway's log audits calls to the API. The file is opened for appending and flushed at each line, so that concurrent
commands do not mix. Anyone who can write to the folder can change the file: ship it elsewhere where that matters.
"""

import json
import os
import pwd
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from services.errors import ConfigError

if TYPE_CHECKING:
    from services.settings.settings import Settings

out = Console(highlight=False, soft_wrap=True)
AUDIT_FILE = "audit.log"


def print_line(line: str) -> None:
    out.print(f"[dim]{escape(line)}[/]")


def running_settings() -> "Settings":
    """Return the settings, with absolute paths and the ports of the stack that runs from their folder.

    From here on a command's output has log lines of warnings only.
    """
    from infra.local.supervisor.ports import of_running_stack
    from services.observability.log_lines import configure_logging

    configure_logging("warning", "command")
    return of_running_stack(absolute_settings())


def absolute_settings() -> "Settings":
    """Return the settings with absolute paths."""
    from services.settings.settings import load_settings

    settings = load_settings()
    paths = {name: value for name in type(settings).model_fields if isinstance(value := getattr(settings, name), Path)}
    return settings.model_copy(update={name: path.absolute() for name, path in paths.items()})


def check_output(*inputs: Path | None, **paths: Path | None) -> None:
    """Reject files that cannot be made or are inputs, before anything is computed, by option. Raises ConfigError."""
    for option, path in paths.items():
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"--{option}: {path} is a folder; give a file")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"--{option}: no folder {path.parent}; make it, or give another file")
        if path.exists() and any(given is not None and given.exists() and path.samefile(given) for given in inputs):
            raise ConfigError(f"--{option}: {path} is also an input, which would be overwritten; give another file")


@contextmanager
def audited(state_dir: Path, act: str, **details: str) -> Iterator[None]:
    """Write one line about the body: its outcome is ok or the error's class, without the message, which may be private.

    Raises OSError before the body if the file cannot be written, so that every action leaves a line.
    """
    os.close(_opened(state_dir))
    try:
        yield
    except BaseException as error:
        write_act(state_dir, act, type(error).__name__, details)
        raise
    write_act(state_dir, act, "ok", details)


def if_named(name: str) -> dict[str, str]:
    """Return the audit fields of a model name; none for the default name."""
    return {} if name == "default" else {"name": name}


def write_act(state_dir: Path, act: str, outcome: str, details: dict[str, str]) -> None:
    """Append the line: time, user of this machine, command, host and process, and outcome."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "event": "audit",
        "act": act,
        "who": user_name(),
        "origin": f"{socket.gethostname()} pid {os.getpid()}",
        "outcome": outcome,
        **details,
    }
    with os.fdopen(_opened(state_dir), "w") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _opened(state_dir: Path) -> int:
    state_dir.mkdir(parents=True, exist_ok=True)
    return os.open(state_dir / AUDIT_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def user_name() -> str:
    """Return the user's name, or its number if the machine has no name for it, as in a container."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"
