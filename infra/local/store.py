"""The feature store of offline commands: the running store, or one started for the duration of the command."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis

from infra.local.parts import valkey_part
from infra.local.servers.access import prepare_valkey
from infra.local.servers.environment import part_environment
from infra.local.supervisor.leftovers import end_leftovers
from infra.local.supervisor.ports import STORE_SETTINGS, check_free, is_free, ports_of, with_free_ports
from infra.local.supervisor.probes import TIMEOUT_S, answers_redis
from infra.local.supervisor.stackfile import StackFile
from infra.local.supervisor.supervisor import Supervisor
from services.errors import EnvironmentFault
from services.settings.redis_clients import client_options
from services.settings.settings import Settings

_ANY_PORT = 0


@contextmanager
def feature_store(settings: Settings, report: Callable[[str], None]) -> Iterator[Settings]:
    """Provide a store, and yield the settings with its port, chosen freely unless a setting names another server.

    Data stays in the state folder, where the stack finds it. Raises EnvironmentFault if another program has the port. A
    store with TLS or on another machine is never started here: EnvironmentFault is raised if it does not answer.
    """
    is_named = not settings.model_fields_set.isdisjoint(STORE_SETTINGS)
    if is_named and _answers(settings):
        yield settings
        return
    if is_named and (settings.redis_tls_ca_file is not None or not is_free(settings.redis_host, _ANY_PORT)):
        raise EnvironmentFault(
            f"no store answers at {settings.redis_host}:{settings.redis_port}, and this machine cannot start it; "
            "start it, or correct TAILRACE_REDIS_HOST and TAILRACE_REDIS_PORT"
        )
    with _started(settings, report) as own:
        yield own


@contextmanager
def _started(settings: Settings, report: Callable[[str], None]) -> Iterator[Settings]:
    """Run the embedded store."""
    stack_file = StackFile(settings.state_dir)
    stack_file.claim()
    try:
        end_leftovers(settings.state_dir)
        settings = with_free_ports(settings, stack_file.ports())
        part = valkey_part(settings)
        check_free(*part.ports)
        stack_file.write_ports(ports_of(settings))
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
        supervisor.enter("store")
        try:
            supervisor.bring_up((part,))
            yield settings
        finally:
            supervisor.stop()
    finally:
        stack_file.release()


def _answers(settings: Settings) -> bool:
    """Return whether a store answers, even if it refuses the password."""
    if settings.redis_tls_ca_file is None:
        return answers_redis(settings.redis_host, settings.redis_port)
    options = client_options(settings.redis_address)
    try:
        with redis.Redis(**options, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as store:
            return bool(store.ping())
    except redis.AuthenticationError:
        return True
    except redis.RedisError:
        return False
