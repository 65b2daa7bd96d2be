"""Log lines are JSON objects that are written immediately."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from services.observability.log_lines import SharedFile, configure_logging

LOG = """
import structlog
from services.observability.log_lines import configure_logging
configure_logging("info", "gateway")
for number in range(100):
    structlog.get_logger().info("recommended", tier="llm", text="x" * 1_000)
import os
os.write(2, b"answered")
"""
IN_A_REPLICA = """
import builtins, os, signal, sys
from pathlib import Path
import structlog
from services.observability.log_lines import configure_logging
builtins.print = lambda *objects, **_options: held_back.append(objects)
sys.stdout = sys.stderr = held_back = []
configure_logging("info", "gateway", *map(Path, sys.argv[1:]))
structlog.get_logger().info("recommended", request_id="r")
os.kill(os.getpid(), signal.SIGKILL)
"""
APPEND = """
import sys
from pathlib import Path
from services.observability.log_lines import SharedFile
log = SharedFile(Path(sys.argv[1]), max_bytes=int(sys.argv[3]))
for number in range(1_000):
    log.write(f"{sys.argv[2]} {number:4}\\n")
"""


def test_a_line_has_the_context_and_its_process(capfd: pytest.CaptureFixture[str]) -> None:
    """Each line has the part and the process id; lines below the level are not written."""
    configure_logging("info", "standby")
    with structlog.contextvars.bound_contextvars(request_id="r"):
        structlog.get_logger().info("recommended", tier="llm")
        structlog.get_logger().debug("noise")

    (line,) = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {"event": "recommended", "tier": "llm", "request_id": "r", "level": "info"}.items() <= line.items()
    assert (line["part"], line["pid"]) == ("standby", os.getpid())


def test_an_exception_that_a_library_only_logs_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Its other messages, which may come with each attempt of a client, are none."""
    configure_logging("info", "standby")
    configure_logging("info", "standby")
    library = logging.getLogger("a.library")
    library.error("cannot connect")
    try:
        int("no number")
    except ValueError:
        library.exception("unhandled in %s", "a task")

    (line,) = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {"event": "library_failed", "library": "a.library", "message": "unhandled in a task"}.items() <= line.items()
    assert "ValueError: invalid literal" in line["exception"]


@pytest.mark.parametrize("sink", ["standard output", "file"])
def test_a_replica_s_line_is_out_before_it_is_killed(sink: str, tmp_path: Path) -> None:
    """A line is complete and written immediately, even if Ray Serve has replaced print and the standard streams."""
    log_file = tmp_path / "logs" / "gateway.log"

    killed = subprocess.run(
        [sys.executable, "-c", IN_A_REPLICA, *([str(log_file)] if sink == "file" else [])],
        stdout=subprocess.PIPE,
        check=False,
        timeout=60,
    )

    (line,) = (log_file.read_bytes() if sink == "file" else killed.stdout).splitlines()
    assert json.loads(line)["request_id"] == "r"


@pytest.mark.parametrize("output", ["full disk", "closed pipe", "pipe that nobody reads", "closed file"])
def test_a_log_line_that_cannot_be_written_holds_nobody_up(output: str) -> None:
    """Log calls return without an error if standard output is full, closed or not read."""
    reader, writer = os.pipe()
    if output != "pipe that nobody reads":
        os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    behind = {"full disk": full, "closed file": None}.get(output, writer)
    command = ["sh", "-c", 'exec "$@" >&-', "sh"] if behind is None else []
    try:
        process = subprocess.run(
            [*command, sys.executable, "-c", LOG], stdout=behind, stderr=subprocess.PIPE, check=False, timeout=60
        )
    finally:
        for descriptor in (writer, full, *([reader] if output == "pipe that nobody reads" else [])):
            os.close(descriptor)

    assert process.stderr == b"answered"


def test_processes_share_a_file_that_is_rotated(tmp_path: Path) -> None:
    """Each line of each process is complete in one of two files, which hardly exceed the size limit."""
    log, max_bytes = tmp_path / "gateway.log", 8_000  # of 14,000 bytes written
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, str(log), name, str(max_bytes)]) for name in ("a", "b")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]

    files = (log, tmp_path / "gateway.log.old")
    lines = [line for path in files for line in path.read_text().splitlines()]
    assert sorted(lines) == [f"{name} {number:4}" for name in ("a", "b") for number in range(1_000)]
    assert all(path.stat().st_size < max_bytes + 100 for path in files)


def test_a_file_that_was_taken_away_is_made_again(tmp_path: Path) -> None:
    """If the log file is renamed or removed, the next line creates a new file; a full disk raises nothing."""
    log = tmp_path / "gateway.log"
    out = SharedFile(log)

    out.write("first\n")
    log.rename(tmp_path / "shipped.log")
    out.write("second\n")

    assert log.read_text() == "second\n"
    assert SharedFile(Path("/dev/full")).write("a line\n") == len("a line\n")
