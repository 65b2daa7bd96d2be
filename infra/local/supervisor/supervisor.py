"""Start the parts, restart crashed or hung parts, and stop all in order; `lifecycle` decides when.

One thread, one loop. It must be the process that lives longest: the kernel ends the keepers with it.
"""

import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from infra.local.supervisor.keeper import adopt_orphans, keeper_command, sweep
from infra.local.supervisor.lifecycle import Command, Observation, PartState, Phase, advance, backoff_s
from infra.local.supervisor.part import Part
from infra.local.supervisor.stackfile import PartRecord, StackFile, StackRecord
from services.errors import EnvironmentFault

TICK_S = 0.05
CALM_TICK_S = 0.5
PROBE_EVERY_S = {Phase.STARTING: 0.1, Phase.HEALTHY: 2.0, Phase.UNHEALTHY: 0.5}
MAX_FIRST_FAILURES = 3
STOP_ORDER = ("edge", "standby", "serve", "pipeline", "worker", "release", "broker", "valkey", "metrics")


class StopRequested(BaseException):
    """A stop was requested. Not an error, so no `except Exception` may swallow it."""


@dataclass(slots=True)
class _Running:
    """One part and its state; owned by the supervisor. `is_once`: the part ends by itself, and is not restarted."""

    part: Part
    is_once: bool = False
    state: PartState = field(default_factory=PartState)
    keeper: subprocess.Popen[bytes] | None = None
    probed_s: float = float("-inf")
    was_healthy: bool = False

    @property
    def is_alive(self) -> bool:
        return self.keeper is not None and self.keeper.poll() is None


class Supervisor:
    """The owner of all processes of one stack.

    Every part inherits `environment`. `report` receives one line for the operator at a time. When `stop_requested`
    returns True, which is checked at every tick, every method that waits raises StopRequested.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        log_dir: Path,
        stack_file: StackFile,
        supervisor_pid: int,
        report: Callable[[str], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._environment = environment
        self._log_dir = log_dir
        self._stack_file = stack_file
        self._pid = supervisor_pid
        self._report = report
        self._stop_requested = stop_requested
        self._running: dict[str, _Running] = {}
        self._stage = "starting"
        adopt_orphans()

    def enter(self, stage: str) -> None:
        """Write the stage into the record."""
        self._stage = stage
        self._record()

    def bring_up(self, parts: tuple[Part, ...]) -> None:
        """Start these parts and wait until they are healthy.

        Raises EnvironmentFault with a failed part's last log lines.
        """
        for part in parts:
            self._running[part.name] = _Running(part)
        waiting = [self._running[part.name] for part in parts]
        while any(running.state.phase is not Phase.HEALTHY for running in waiting):
            self.tick()
            for running in waiting:
                if running.state.num_failures >= MAX_FIRST_FAILURES:
                    raise EnvironmentFault(self.why_down(running.part.name))

    def run_once(self, part: Part) -> None:
        """Run a part that ends by itself, on this terminal. Raises EnvironmentFault if it fails."""
        self.begin(part, own_log=False)
        while (code := self.ended(part.name)) is None:
            self.tick()
        if code:
            raise EnvironmentFault(f"{part.name} ended with code {code}; see the lines above")

    def begin(self, part: Part, *, own_log: bool = True) -> None:
        """Start a part that ends by itself, while other parts start and run."""
        self._running[part.name] = _Running(part, is_once=True, keeper=self._spawn(part, own_log=own_log))

    def lower_priority(self, name: str, by: int) -> None:
        """Give a running part less processor time than other parts, from now on."""
        keeper = self._running[name].keeper
        below = psutil.Process(keeper.pid).children(recursive=True) if keeper is not None else ()
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.nice(min(19, process.nice() + by))

    def ended(self, name: str) -> int | None:
        """Return the exit code of a part that ends by itself, once; None while it runs."""
        keeper = self._running[name].keeper
        code = None if keeper is None else keeper.poll()
        if code is not None:
            del self._running[name]
        return code

    def watch(self) -> None:
        """Supervise until StopRequested."""
        while True:
            self.tick()

    def tick(self) -> None:
        """Observe every part once, act, and pause shortly. Raises StopRequested."""
        if self._stop_requested():
            raise StopRequested
        before = self._phases()
        for running in list(self._running.values()):
            if not running.is_once:
                self._advance(running)
        if self._phases() != before:
            self._record()
        self._pause()

    def _pause(self) -> None:
        """Wait for the next tick: briefly at the start, or while all parts are healthy, longer unless one ends."""
        if self._stage == "starting" or any(
            running.state.phase is not Phase.HEALTHY for running in self._running.values()
        ):
            time.sleep(TICK_S)
            return
        with ExitStack() as closing:
            ends = select.poll()
            for running in self._running.values():
                if running.keeper is not None and running.is_alive:
                    ended = os.pidfd_open(running.keeper.pid)
                    closing.callback(os.close, ended)
                    ends.register(ended, select.POLLIN)
            ends.poll(1_000 * CALM_TICK_S)

    def stop(self) -> None:
        """Stop all parts in order, each within its grace period, and kill their leftovers.

        Parts without a place in the order stop first.
        """
        self.enter("stopping")
        for name in sorted(self._running, key=lambda name: STOP_ORDER.index(name) if name in STOP_ORDER else -1):
            self._stop_one(self._running[name])
        self._running.clear()
        sweep()
        self._stack_file.forget()

    def _advance(self, running: _Running) -> None:
        now_s = time.monotonic()
        was = running.state
        running.state, command = advance(was, self._observe(running, now_s), now_s, running.part.restart_policy)
        if command is Command.KILL and running.keeper is not None:
            self._report_line(f"{running.part.name}: no answer for {now_s - was.since_s:.0f} s, killing it")
            running.keeper.terminate()
        if command is Command.SPAWN:
            running.keeper = self._try_to_spawn(running.part)
        self._report_change(running, was)

    def _observe(self, running: _Running, now_s: float) -> Observation:
        alive = running.is_alive
        due_s = running.probed_s + PROBE_EVERY_S.get(running.state.phase, float("inf"))
        if alive and now_s >= due_s:
            running.was_healthy = running.part.is_healthy()
            running.probed_s = now_s
        needs_met = all(self._running[name].state.phase is Phase.HEALTHY for name in running.part.needs)
        return Observation(alive=alive, healthy=alive and running.was_healthy, needs_met=needs_met)

    def _report_change(self, running: _Running, was: PartState) -> None:
        name, state = running.part.name, running.state
        if state.phase is was.phase:
            return
        if state.phase is Phase.BACKING_OFF:
            self._sweep()
            code = running.keeper.poll() if running.keeper else None
            running.was_healthy, running.probed_s = False, float("-inf")
            self._report_line(
                f"{name}: died{'' if code is None else f' (code {code})'}, "
                f"starting it again in {backoff_s(state.num_failures):g} s"
            )
        elif state.phase is Phase.HEALTHY and was.phase is Phase.STARTING:
            again = f" again (restart {state.num_restarts})" if state.num_restarts else ""
            self._report_line(f"{name}: healthy{again} after {state.since_s - was.since_s:.1f} s")
        elif state.phase is Phase.UNHEALTHY:
            self._report_line(f"{name}: unavailable")
        elif state.phase is Phase.HEALTHY and was.phase is Phase.UNHEALTHY:
            self._report_line(f"{name}: healthy again")

    def _report_line(self, line: str) -> None:
        """Report a line to the operator; a full disk behind their output is ignored."""
        with suppress(OSError):
            self._report(line)

    def _try_to_spawn(self, part: Part) -> subprocess.Popen[bytes] | None:
        """Start the part, or report why not: the machine may lack memory or disk while other parts still serve."""
        try:
            return self._spawn(part, own_log=True)
        except OSError as error:
            self._report_line(f"{part.name}: cannot be started ({error})")
            return None

    def _spawn(self, part: Part, *, own_log: bool) -> subprocess.Popen[bytes]:
        command = keeper_command(self._pid, part.grace_s, part.command)
        environment = {**self._environment, **part.environment}
        if part.heartbeat is not None:
            part.heartbeat.unlink(missing_ok=True)
        with ExitStack() as closing:
            log = closing.enter_context((self._log_dir / f"{part.name}.log").open("ab")) if own_log else None
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if own_log else None,
                # Linux divides processor time among sessions first: in its own, the edge would wait for the gateways
                process_group=0,
            )

    def _stop_one(self, running: _Running) -> None:
        if running.keeper is None or running.keeper.poll() is not None:
            return
        running.keeper.terminate()
        try:
            running.keeper.wait(timeout=running.part.grace_s + 5.0)
        except subprocess.TimeoutExpired:
            running.keeper.kill()
            running.keeper.wait()

    def _sweep(self) -> None:
        """Kill the leftovers of a dead part's keeper."""
        sweep(spared=frozenset(running.keeper.pid for running in self._running.values() if running.keeper))

    def why_down(self, name: str) -> str:
        """Return the end of a part's log."""
        log = self._log_dir / f"{name}.log"
        lines = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
        return f"{name} does not start; the end of {log}:\n" + "\n".join(lines)

    def _phases(self) -> list[tuple[str, Phase, int]]:
        return [(name, run.state.phase, run.state.num_restarts) for name, run in self._running.items()]

    def _record(self) -> None:
        parts = {
            name: PartRecord(
                phase=run.state.phase,
                keeper_pid=run.keeper.pid if run.keeper and run.is_alive else None,
                num_restarts=run.state.num_restarts,
            )
            for name, run in self._running.items()
        }
        try:
            self._stack_file.write(StackRecord(supervisor_pid=self._pid, stage=self._stage, parts=parts))
        except OSError as error:
            self._report_line(f"the record cannot be written, so `tailrace status` is stale ({error})")
