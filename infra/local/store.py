"""A feature store for work outside the stack: the one that runs, or one started for as long as the work takes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infra.local.access import prepare_valkey
from infra.local.parts import valkey_part
from infra.local.ports import check_free
from infra.local.probes import answers_redis
from infra.local.stackfile import StackFile
from infra.local.supervisor import Supervisor
from infra.local.up import part_environment
from services.settings import Settings


@contextmanager
def feature_store(settings: Settings, report: Callable[[str], None]) -> Iterator[None]:
    """Have a store answer on the configured port meanwhile. Raises EnvironmentFault when something else has the port.

    What is written stays in the state folder, for the stack to start from.
    """
    if answers_redis(settings.redis_host, settings.redis_port):
        yield
        return
    part = valkey_part(settings)
    stack_file = StackFile(settings.state_dir)
    stack_file.claim()
    for port in part.ports:
        check_free(port)
    (settings.state_dir / "logs").mkdir(parents=True, exist_ok=True)
    prepare_valkey(settings)
    supervisor = Supervisor(
        environment=part_environment(settings),
        log_dir=settings.state_dir / "logs",
        stack_file=stack_file,
        supervisor_pid=os.getpid(),
        report=report,
        stop_requested=lambda: False,
    )
    try:
        supervisor.bring_up((part,))
        yield
    finally:
        supervisor.stop()
        stack_file.release()
