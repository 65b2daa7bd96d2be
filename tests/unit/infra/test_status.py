"""`tailrace status`: the health of parts, from the stack's record and its processes."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.commands.status import inspect_stack
from infra.local.supervisor.lifecycle import Phase
from infra.local.supervisor.stackfile import PartRecord, StackFile, StackRecord
from services.settings.settings import Settings
from tests.support.servers import free_port


@pytest.fixture
def keeper() -> Iterator[int]:
    """The process id of a keeper whose part runs and does not answer."""
    with subprocess.Popen(["sh", "-c", "echo; sleep 1000 & wait"], stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        os.killpg(process.pid, 9)


@pytest.mark.parametrize(
    ("stage", "phase", "health"),
    [
        ("answering", None, "starting"),
        ("ready", None, "down"),
        ("answering", Phase.STARTING, "starting"),
        ("ready", Phase.STARTING, "starting"),
        ("ready", Phase.UNHEALTHY, "unavailable"),
    ],
)
def test_a_part_that_starts_is_not_called_unavailable(
    tmp_path: Path, keeper: int, stage: str, phase: Phase | None, health: str
) -> None:
    """The standby starts after the first answers, and each part again after a fault; only then it is not at fault."""
    stack_file = StackFile(tmp_path)
    stack_file.claim()
    parts = {} if phase is None else {"standby": PartRecord(phase=phase, keeper_pid=keeper, num_restarts=0)}
    stack_file.write(StackRecord(supervisor_pid=os.getpid(), stage=stage, parts=parts))
    settings = Settings(state_dir=tmp_path, standby_http_port=free_port(), standby_grpc_port=free_port())
    inspected = {part.name: part for part in inspect_stack(settings)}
    stack_file.release()

    assert (inspected["standby"].health, inspected["standby"].is_healthy) == (health, False)
