"""The programs that a single-node Ray starts in place of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from infra.local.servers import ray_agent, ray_worker
from infra.local.servers.lean_ray import lean_command
from tests.support.wait import wait_for


def test_workers_and_agent_are_ours(tmp_path: Path) -> None:
    """The node server's command gets our programs, in folders with spaces too, and keeps their other arguments."""
    ray = tmp_path / "site packages" / "ray"
    worker = subprocess.list2cmdline([sys.executable, f"{ray}/_private/workers/setup_worker.py", "worker.py", "--a=1"])
    agent = subprocess.list2cmdline([sys.executable, f"{ray}/dashboard/agent.py", "--head"])

    words = lean_command(["raylet", f"--python_worker_command={worker}", f"--dashboard_agent_command={agent}"], ray)

    assert words == [
        "raylet",
        f"--python_worker_command={sys.executable} {ray_worker.__file__} worker.py --a=1",
        f"--dashboard_agent_command={sys.executable} {ray_agent.__file__} --head",
    ]


def test_the_replaced_programs_exist() -> None:
    """The installed Ray has both programs, at the paths that are replaced in its command."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    ray = Path(spec.origin).parent

    assert (ray / "_private/workers/setup_worker.py").is_file()
    assert (ray / "dashboard/agent.py").is_file()


def test_a_command_without_them_ends_the_start(tmp_path: Path) -> None:
    """Another version of Ray, whose command names other programs, is refused with the file to review."""
    with pytest.raises(ValueError, match="review this file"):
        lean_command(["raylet", "--python_worker_command=python new.py"], tmp_path)


def test_a_worker_has_the_variables_of_its_environment(tmp_path: Path) -> None:
    """The worker's program runs as a main program, with the variables of its environment and its other arguments."""
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nprint(__name__, os.environ['A'], *sys.argv[1:], sys.path[0])")
    context = json.dumps({"command_prefix": [], "env_vars": {"A": "a $b"}, "py_executable": sys.executable})
    started = (sys.executable, ray_worker.__file__, str(program), "--b=2", "--language=PYTHON")

    done = subprocess.run(
        [*started, f"--serialized-runtime-env-context={context}"], capture_output=True, text=True, check=True
    )

    assert done.stdout == f"__main__ a $b --b=2 {tmp_path}\n"


@pytest.mark.parametrize("context", [{"command_prefix": ["nice"]}, {"py_executable": "python2"}, {"java_jars": ["a"]}])
def test_an_environment_of_more_than_variables_is_refused(context: dict[str, object]) -> None:
    """A worker never starts without a part of its runtime environment."""
    with pytest.raises(ValueError, match="only variables are supported"):
        ray_worker.variables_of(context)


def test_the_agent_has_no_ports_and_ends_with_the_node_server(tmp_path: Path) -> None:
    """The agent writes that it has no ports, then runs until its parent ends."""
    agent = [sys.executable, ray_agent.__file__, f"--session-dir={tmp_path}", "--node-id=n", "--head"]
    script = f"import subprocess, time; print(subprocess.Popen({agent}).pid, flush=True); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    agent_pid = int(parent.stdout.readline())
    files = [tmp_path / f"{name}_n" for name in ray_agent.PORTS]
    wait_for(lambda: all(file.exists() for file in files))

    assert [file.read_text() for file in files] == ["-1"] * 3
    assert is_running(agent_pid)
    parent.kill()
    parent.communicate()
    wait_for(lambda: not is_running(agent_pid))


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
