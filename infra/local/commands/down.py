"""`tailrace down`: stop the supervisor, wait for its end, and kill leftover processes."""

import os
import signal
import time
from contextlib import suppress

from infra.local.servers.ray_home import remove_ray_home
from infra.local.supervisor.leftovers import end_leftovers
from infra.local.supervisor.stackfile import StackFile
from services.errors import EnvironmentFault
from services.settings.settings import Settings

TIMEOUT_S = 30.0
POLL_S = 0.05


def stop_stack(settings: Settings) -> bool:
    """Stop this state folder's stack. Returns False if none runs. Raises EnvironmentFault if it does not stop."""
    stack_file = StackFile(settings.state_dir)
    was_running = stack_file.is_claimed()
    supervisor_pid = None
    give_up_s = time.monotonic() + TIMEOUT_S
    while stack_file.is_claimed():
        if supervisor_pid is None and (record := stack_file.read()):  # a starting or ending stack has none
            supervisor_pid = record.supervisor_pid
            _terminate(supervisor_pid)
        if time.monotonic() > give_up_s:
            raise EnvironmentFault(
                f"a stack runs from {settings.state_dir}, but its record is damaged; end its `tailrace up`"
                if supervisor_pid is None
                else f"the supervisor (pid {supervisor_pid}) does not stop; kill -9 it and repeat"
            )
        time.sleep(POLL_S)
    num_hit = end_leftovers(settings.state_dir)
    remove_ray_home(settings.state_dir)
    stack_file.forget()
    return was_running or num_hit > 0


def _terminate(supervisor_pid: int) -> None:
    try:
        with suppress(ProcessLookupError):
            os.kill(supervisor_pid, signal.SIGTERM)
    except PermissionError as error:
        raise EnvironmentFault(
            f"the supervisor (pid {supervisor_pid}) belongs to another user; stop it as that user"
        ) from error
