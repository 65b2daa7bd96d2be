"""`tailrace up`: check the machine, start the stores, the first training if it is due, what answers, then the rest.

The first answer does not need the rest, which would take processor time from Ray's start. All validation happens before
anything starts. `--detach` runs the same in its own session.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

from infra.local.commands.first_training import FirstTraining, fault_of_live, is_due, log_of
from infra.local.edge.admin import ray_is_up
from infra.local.edge.config import edge_folder
from infra.local.parts import stack_parts
from infra.local.servers.access import check_access, prepare_valkey
from infra.local.servers.environment import part_environment
from infra.local.servers.ray_home import make_ray_home, ray_environment, remove_ray_home
from infra.local.supervisor.leftovers import end_leftovers
from infra.local.supervisor.part import Part
from infra.local.supervisor.ports import check_free, ports_of, with_free_ports
from infra.local.supervisor.probes import answers_http
from infra.local.supervisor.stackfile import StackFile
from infra.local.supervisor.supervisor import StopRequested, Supervisor
from models.registry.store import BundleStore
from services.errors import EnvironmentFault
from services.observability.log_lines import MAX_LOG_BYTES
from services.settings.settings import Settings, inherited_environment

STORES = ("valkey", "broker")
ANSWERS = ("worker", "serve", "edge")
"""The parts that the first answer needs; the worker creates the topics that gateways wait for."""
ANSWERING = frozenset({"answering", "training", "ready", "untrained"})
"""The stages of a stack that answers; in all but `answering` every part is healthy."""
READY_WITHIN_S = 120.0
POLL_S = 0.1


def run_stack(
    settings: Settings,
    report: Callable[[str], None],
    when_ready: Callable[[Settings], None],
    parts_of: Callable[[Settings], tuple[Part, ...]] = stack_parts,
    items: Sequence[str] = (),
) -> None:
    """Run the whole stack until SIGINT, SIGTERM or SIGHUP. Raises EnvironmentFault if it cannot start.

    `settings.state_dir` must be absolute. `when_ready` is called once, when a bundle answers, with the settings and
    chosen ports. `items` names a shop's items to import first, and the options of their table.
    """
    stack_file = StackFile(settings.state_dir)
    stack_file.claim()
    try:
        if fault := fault_of_live(BundleStore.of(settings, settings.first_name)):
            report(fault)
        if num_hit := end_leftovers(settings.state_dir):
            report(f"killed {num_hit} processes that an earlier crash left behind")
        check_access(settings)
        if settings.items_snapshot.exists():
            from services.items.snapshot import check_snapshot

            check_snapshot(settings.items_snapshot)  # the embedded broker's new topic does not replace it
        settings = with_free_ports(settings, stack_file.ports())
        parts = parts_of(settings)
        ports = [port for part in parts for port in part.ports]
        check_free(*ports)
        stack_file.write_ports(ports_of(settings))
        for_ray = ray_environment(make_ray_home(settings.state_dir), settings, {port.number for port in ports})
        parts = tuple(with_environment(part, for_ray) if part.name == "serve" else part for part in parts)
        _supervise(parts, settings, stack_file, report, when_ready, items)
    finally:
        stack_file.release()


def _supervise(
    parts: tuple[Part, ...],
    settings: Settings,
    stack_file: StackFile,
    report: Callable[[str], None],
    when_ready: Callable[[Settings], None],
    items: Sequence[str],
) -> None:
    supervisor = local_supervisor(settings, stack_file, report)
    training = FirstTraining(supervisor, settings, report)
    try:
        _start(supervisor, parts, settings, items, training)
        supervisor.enter("answering")  # `--detach` waits for this
        when_ready(settings)
        supervisor.bring_up(tuple(part for part in parts if part.name not in STORES + ANSWERS))
        supervisor.enter(training.stage)
        while training.stage == "training":
            supervisor.tick()
            if training.observe():
                supervisor.enter(training.stage)
        supervisor.watch()
    except StopRequested:
        report("stopping")
    finally:
        supervisor.stop()
        remove_ray_home(settings.state_dir)


def start_in_background(
    settings: Settings, out: IO[str], items: Sequence[str] = (), stages: Container[str] = ("ready",)
) -> None:
    """Run `tailrace up` in its own session, with these items if any, and wait as `until_ready`.

    Raises EnvironmentFault as `until_ready`, and if a stack already runs.
    """
    command = ("infra.cli.main", "up", *(("--items", *items) if items else ()))
    until_ready(settings, spawn_stack(settings, command, own_session=True), out, stages)


def spawn_stack(settings: Settings, command: Sequence[str], *, own_session: bool = False) -> "subprocess.Popen[bytes]":
    """Run a module that runs a stack with these settings.

    With `own_session` it outlives the terminal, but Linux divides processor time between it and the caller as sessions,
    whatever their niceness. Raises EnvironmentFault if a stack already runs.
    """
    log_path = _log_path(settings)
    log_path.parent.mkdir(parents=True, exist_ok=True)

    def spawn(lock: IO[str]) -> "subprocess.Popen[bytes]":
        with log_path.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**inherited_environment(), **settings.as_environment()},
                stdin=lock,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=None if own_session else 0,
                start_new_session=own_session,
            )

    return StackFile(settings.state_dir).claim_for(spawn)


def until_ready(
    settings: Settings, child: "subprocess.Popen[bytes]", out: IO[str], stages: Container[str] = ("ready",)
) -> None:
    """Copy a spawned stack's output to `out` until one of these stages; by default, a first training must have ended.

    Raises EnvironmentFault if the stack ends first, or if its first training fails.
    """
    stack_file, log_path = StackFile(settings.state_dir), _log_path(settings)
    with log_path.open(errors="replace") as output:
        while child.poll() is None:
            record = stack_file.read()
            stage = record.stage if record is not None and record.supervisor_pid == child.pid else ""
            out.write(output.read())
            out.flush()
            if stage in stages:
                return
            if stage == "untrained":
                raise EnvironmentFault(f"the first training failed; see {log_of(settings)}")
            time.sleep(POLL_S)
        out.write(output.read())
    raise EnvironmentFault(f"the stack did not start; its output is above and in {log_path}")


def _log_path(settings: Settings) -> Path:
    return settings.state_dir / "logs" / "up.log"


def local_supervisor(settings: Settings, stack_file: StackFile, report: Callable[[str], None]) -> Supervisor:
    """Return a supervisor for this state folder that stops at SIGINT, SIGTERM and, unless under `nohup`, SIGHUP.

    Empties the metrics folder.
    """
    log_dir = settings.state_dir / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    settings.stages_dir.mkdir(exist_ok=True)  # erasures stay pending while it is absent
    prepare_valkey(settings)
    shutil.rmtree(settings.metrics_dir, ignore_errors=True)
    settings.metrics_dir.mkdir(parents=True)
    for log in log_dir.glob("*.log"):
        if log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_suffix(".log.old"))
    return Supervisor(
        environment=part_environment(settings),
        log_dir=log_dir,
        stack_file=stack_file,
        supervisor_pid=os.getpid(),
        report=report,
        stop_requested=_watch_signals(),
    )


def with_environment(part: Part, environment: dict[str, str]) -> Part:
    return replace(part, environment={**part.environment, **environment})


def items_part(items: Sequence[str]) -> Part:
    """Return the import of a shop's items, which become the first bundle without a live bundle."""
    command = (sys.executable, "-m", "infra.cli.main", "import", "items", *items, "--first-bundle")
    return Part(name="items", command=command)


def _start(
    supervisor: Supervisor,
    parts: tuple[Part, ...],
    settings: Settings,
    items: Sequence[str],
    training: FirstTraining,
) -> None:
    supervisor.enter("starting")
    supervisor.bring_up(tuple(part for part in parts if part.name in STORES))
    if items:
        supervisor.run_once(items_part(items))
    if is_due(BundleStore.of(settings, settings.first_name)):
        training.begin()
    supervisor.bring_up(tuple(part for part in parts if part.name in ANSWERS))
    give_up_s = time.monotonic() + READY_WITHIN_S
    edge = edge_folder(settings.state_dir)
    while not (answers_http(settings.inner_host, settings.inner_http_port, "/readyz") and ray_is_up(edge)):
        if time.monotonic() > give_up_s:
            raise EnvironmentFault(f"no request was answered; see {settings.state_dir / 'logs' / 'serve.log'}")
        supervisor.tick()


def _watch_signals() -> Callable[[], bool]:
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, receive)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, receive)
    return lambda: bool(received)
