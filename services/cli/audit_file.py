"""The audit file of one state folder: a line of JSON for each administrative act at the command line, refused ones too.

What comes in through the doors is audited in the gateway's log. Opened for appending at each act and flushed to disk, so
that commands that run at once do not mix; whoever may write the folder may still change it: send it on where that matters.
"""

import json
import os
import pwd
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

AUDIT_FILE = "audit.log"


@contextmanager
def audited(state_dir: Path, act: str, **details: str) -> Iterator[None]:
    """Write one line about what is done inside: its outcome is ok or the error's class, whose message may be private."""
    try:
        yield
    except BaseException as error:
        write_act(state_dir, act, type(error).__name__, details)
        raise
    write_act(state_dir, act, "ok", details)


def write_act(state_dir: Path, act: str, outcome: str, details: dict[str, str]) -> None:
    """Append the line: when, who (the user of this machine), what, from where, and how it ended."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "event": "audit",
        "act": act,
        "who": _user(),
        "origin": f"{socket.gethostname()} pid {os.getpid()}",
        "outcome": outcome,
        **details,
    }
    state_dir.mkdir(parents=True, exist_ok=True)
    opened = os.open(state_dir / AUDIT_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(opened, "w") as out:
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
        out.flush()
        os.fsync(out.fileno())


def _user() -> str:
    """Name the user; a number where the machine knows no name for it, as in a container."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"
