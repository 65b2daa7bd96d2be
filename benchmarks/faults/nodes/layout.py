"""Network namespaces as machines, each with its own address on one bridge. Requires Linux and root.

    front (edge, standby, stores, callers) ── bridge ─┬─ head    (Ray's control plane)
                                                      ├─ node1   (gateway, LLM, stream worker)
                                                      └─ node2   ...

CPUs are shared evenly between busy machines (by control groups, if the kernel has them), so that a starting machine
does not slow other machines. The bridge is in `front`, so it cannot be reached from outside, and two layouts on one
machine never meet. A machine's processes see its folder at `Layout.seen_as`: the same path on every machine, with
different content.
"""

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.errors import EnvironmentFault

FRONT, HEAD = "front", "head"
_NETWORK = "10.77.0"
_BRIDGE = "bridge0"
_RUN_DIR = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
"""The control group hierarchy (version 1) that divides CPU time; absent under version 2 or without control groups."""
_ONE_HIERARCHY = Path("/sys/fs/cgroup")
_JOIN_THEN_RUN = 'echo $$ > "$1" && shift && exec "$@"'
_BIND_THEN_RUN = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'


def why_not() -> str | None:
    """Return why this machine cannot have namespaces, None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root's rights; run it as root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip`; install iproute2"
    probe = f"tailrace-probe-{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except EnvironmentFault as error:
        return f"network namespaces are refused here: {error}"
    return None


@dataclass(frozen=True, slots=True)
class Layout:
    """The machines of one cluster. `name` prefixes the namespaces' names; `folder` holds one folder per machine."""

    name: str
    folder: Path
    num_nodes: int

    @property
    def workers(self) -> tuple[str, ...]:
        """The nodes that run replicas."""
        return tuple(f"node{number}" for number in range(1, self.num_nodes))

    @property
    def machines(self) -> tuple[str, ...]:
        """Every machine, the front first."""
        return (FRONT, HEAD, *self.workers)

    @property
    def seen_as(self) -> Path:
        """Path of each node's folder for its processes; short, as Unix socket paths are limited to 107 characters."""
        return Path("/tmp") / self.name  # noqa: S108 - made with mode 700, and bound over in the nodes

    def address(self, machine: str) -> str:
        """Return the machine's address."""
        return f"{_NETWORK}.{1 if machine == FRONT else 10 + self.machines.index(machine) - 1}"

    def folder_of(self, machine: str) -> Path:
        """Return the machine's folder, by its path on the host."""
        return self.folder / machine

    def namespace(self, machine: str) -> str:
        """Return the name of the machine's namespace."""
        return f"{self.name}-{machine}"

    def make(self) -> None:
        """Make the namespaces, the bridge and the folders. Raises EnvironmentFault if it fails."""
        self.seen_as.mkdir(mode=0o700, exist_ok=True)
        self._make_groups()
        for machine in self.machines:
            self.folder_of(machine).mkdir(parents=True, exist_ok=True)
            _ip("netns", "add", self.namespace(machine))
            self._in(machine, "link", "set", "lo", "up")
        self._in(FRONT, "link", "add", _BRIDGE, "type", "bridge")
        self._in(FRONT, "addr", "add", f"{self.address(FRONT)}/24", "dev", _BRIDGE)
        self._in(FRONT, "link", "set", _BRIDGE, "up")
        for machine in (HEAD, *self.workers):
            self._in(FRONT, "link", "add", machine, "type", "veth", "peer", "eth0", "netns", self.namespace(machine))
            self._in(FRONT, "link", "set", machine, "master", _BRIDGE, "up")
            self._in(machine, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
            self._in(machine, "link", "set", "eth0", "up")
            self._in(machine, "route", "add", "default", "via", self.address(FRONT))

    def remove(self) -> None:
        """Remove the namespaces, with bridge and links, by name. Their processes, except this one, must have ended."""
        for machine in self.machines:
            if (_RUN_DIR / self.namespace(machine)).exists():
                _ip("netns", "del", self.namespace(machine))
        shutil.rmtree(self.seen_as, ignore_errors=True)
        self._remove_groups()

    def enter(self) -> None:
        """Move this thread, and its future child processes, to the front. Call before any other thread is started."""
        if (tasks := self._tasks(FRONT)) is not None:
            tasks.write_text(str(os.getpid()))
        with (_RUN_DIR / self.namespace(FRONT)).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise EnvironmentFault(f"cannot enter {self.namespace(FRONT)}: {os.strerror(ctypes.get_errno())}")

    def inside(self, machine: str, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs this command on the machine, with the machine's folder at `seen_as`."""
        tasks = self._tasks(machine)
        join = () if tasks is None else ("sh", "-c", _JOIN_THEN_RUN, "sh", str(tasks))  # `ip` hides the groups
        bind = ("sh", "-c", _BIND_THEN_RUN, "sh", str(self.folder_of(machine)), str(self.seen_as))
        return (*join, "ip", "netns", "exec", self.namespace(machine), *bind, *command)

    def pids(self, machine: str) -> list[int]:
        """Return every process on the machine."""
        return [int(word) for word in _ip("netns", "pids", self.namespace(machine)).split()]

    def cut(self, machine: str) -> None:
        """Cut the machine's network: packets in both directions are lost, and no connection is closed."""
        self._in(FRONT, "link", "set", machine, "nomaster")

    def mend(self, machine: str) -> None:
        """End `cut`."""
        self._in(FRONT, "link", "set", machine, "master", _BRIDGE)

    @property
    def _group(self) -> Path | None:
        if _CPU_GROUPS.is_dir():
            return _CPU_GROUPS / self.name
        controllers = _ONE_HIERARCHY / "cgroup.subtree_control"
        return (
            _ONE_HIERARCHY / self.name if controllers.is_file() and "cpu" in controllers.read_text().split() else None
        )

    def _tasks(self, machine: str) -> Path | None:
        return None if self._group is None else self._group / machine / "cgroup.procs"

    def _make_groups(self) -> None:
        if self._group is None:
            return
        for machine in self.machines:
            (self._group / machine).mkdir(parents=True)
            if (control := self._group / "cgroup.subtree_control").is_file():
                control.write_text("+cpu")

    def _remove_groups(self) -> None:
        if self._group is None or not self._group.is_dir():
            return
        (self._group.parent / "cgroup.procs").write_text(str(os.getpid()))
        for folder in (*(self._group / machine for machine in self.machines), self._group):
            with suppress(OSError):
                folder.rmdir()

    def _in(self, machine: str, *words: str) -> None:
        _ip("-n", self.namespace(machine), *words)


def _ip(*words: str) -> str:
    done = subprocess.run([shutil.which("ip") or "ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentFault(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
