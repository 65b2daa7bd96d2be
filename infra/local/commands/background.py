"""`tailrace up --detach`: the same supervisor in a session of its own, and its words until it is ready."""

import subprocess
import sys
import time
from typing import IO

from infra.local.supervisor.stackfile import StackFile
from services.errors import EnvironmentFault
from services.settings.settings import Settings, inherited_environment

POLL_S = 0.1


def start_in_background(settings: Settings, out: IO[str]) -> None:
    """Start `tailrace up` detached, copy what it says to `out`, and return when it is ready.

    Raises EnvironmentFault when it ends instead, or when one runs already, whose words are in the same file.
    """
    stack_file = StackFile(settings.state_dir)
    if stack_file.is_claimed():
        raise stack_file.taken()
    log_path = settings.state_dir / "logs" / "up.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "up"],
            env={**inherited_environment(), **settings.as_environment()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with log_path.open(errors="replace") as said:
        while child.poll() is None:
            record = stack_file.read()
            is_ready = record is not None and record.supervisor_pid == child.pid and record.stage == "ready"
            out.write(said.read())
            out.flush()
            if is_ready:
                return
            time.sleep(POLL_S)
        out.write(said.read())
    raise EnvironmentFault(f"the stack did not start; its words are above and in {log_path}")
