"""The record of a running stack, `<state>/run/stack.json`, its ports, the one-stack-per-folder lock, and process marks.

The supervisor holds the lock until it ends, which distinguishes its record from that of a crashed stack.
"""

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from models.files import write_durably
from services.errors import EnvironmentFault

MARK = "STACK_OF_TAILRACE"
"""The variable in the environment of every process of a stack; its value is the stack's state folder."""
_STDIN = 0
_CHECK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """The last recorded state of a part. `keeper_pid` is None while the part is down."""

    phase: str
    keeper_pid: int | None
    num_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """The last recorded state of the stack. `stage` is starting, training, ready, untrained, stopping, or store.

    In stage training the stack answers while its first training runs; untrained: that training has failed. In stage
    store, only the feature store of an offline command runs.
    """

    supervisor_pid: int
    stage: str
    parts: dict[str, PartRecord] = field(default_factory=dict)


class StackFile:
    """The record of one state folder's stack."""

    def __init__(self, state_dir: Path) -> None:
        self._run_dir = state_dir / "run"
        self._path = self._run_dir / "stack.json"
        self._ports_path = self._run_dir / "ports.json"
        self._lock: IO[str] | None = None

    def claim(self) -> None:
        """Become this folder's only supervisor until this process ends. Raises EnvironmentFault if another runs.

        Replaces an older record at once, because its process id may belong to another process now.
        """
        self._lock = self._inherited() or self._locked()
        self.write(StackRecord(supervisor_pid=os.getpid(), stage="starting"))

    def claim_for(self, spawn: Callable[[IO[str]], "subprocess.Popen[bytes]"]) -> "subprocess.Popen[bytes]":
        """Make a child this folder's only supervisor; `spawn` gives it the lock as its standard input.

        So `tailrace down` stops the child also before its own `claim`. Raises EnvironmentFault as `claim`.
        """
        with self._locked() as lock:
            self.forget()  # its process id may belong to another process now
            child = spawn(lock)
            self.write(StackRecord(supervisor_pid=child.pid, stage="starting"))
        return child

    def _locked(self) -> IO[str]:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        lock = (self._run_dir / "lock").open("a+")
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if self.is_claimed():
                    lock.close()
                    raise self.taken() from error
                time.sleep(_CHECK_S)  # another process's `is_claimed` holds the lock for a moment
            else:
                return lock

    def _inherited(self) -> IO[str] | None:
        """Return the lock that standard input is, and make standard input empty; None if it is another file."""
        try:
            is_lock = os.path.samestat(os.fstat(_STDIN), (self._run_dir / "lock").stat())
        except OSError:
            return None
        if not is_lock:
            return None
        lock = os.fdopen(os.dup(_STDIN), "a+")
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), _STDIN)  # else every process of the stack would hold the lock
        return lock

    def taken(self) -> EnvironmentFault:
        """Return the error for a second stack in this folder, which names the running one."""
        folder, record = self._run_dir.parent, self.read()
        if record is not None and record.stage == "store":
            return EnvironmentFault(
                f"`tailrace pipeline` or another offline command (pid {record.supervisor_pid}) runs a feature store "
                f"from {folder}; wait until it ends (`tailrace down` would end it), or set TAILRACE_STATE_DIR to "
                "another folder"
            )
        return EnvironmentFault(
            f"a stack already runs from {folder}; stop it with `tailrace down`, or set TAILRACE_STATE_DIR to another "
            "folder"
        )

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def is_claimed(self) -> bool:
        """Return whether a supervisor is running."""
        try:
            with (self._run_dir / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def write(self, record: StackRecord) -> None:
        """Replace the record by one rename."""
        _replace(self._path, asdict(record))

    def read(self) -> StackRecord | None:
        """Return the record, or None if it is missing or truncated by a crash of the machine."""
        try:
            fields: dict[str, Any] = json.loads(self._path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        parts = {name: PartRecord(**part) for name, part in fields.pop("parts").items()}
        return StackRecord(**fields, parts=parts)

    def forget(self) -> None:
        """Remove the record. The ports are kept for the next start."""
        self._path.unlink(missing_ok=True)

    def write_ports(self, ports: dict[str, int]) -> None:
        """Record the ports of this folder's stack, by setting."""
        _replace(self._ports_path, ports)

    def ports(self) -> dict[str, int]:
        """Return the ports of this folder's current or last stack; empty if there was none."""
        try:
            ports: dict[str, int] = json.loads(self._ports_path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return ports


def _replace(path: Path, value: dict[str, Any]) -> None:
    write_durably(path, json.dumps(value, indent=1).encode())
