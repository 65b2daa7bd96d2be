"""A separate stack whose store and broker are behind proxies: `python -m benchmarks.faults.stack REDIS KAFKA`.

The servers listen on the two given ports; clients connect to the ports of the settings, where the caller's proxies
listen. The broker advertises the proxy's address, since Kafka clients follow advertised addresses.
"""

import sys
from dataclasses import replace
from functools import partial

from infra.local.binaries import tansu_command
from infra.local.commands.up import run_stack
from infra.local.parts import broker_address, broker_part, stack_parts, valkey_part
from infra.local.supervisor.part import Part
from services.settings.settings import Settings, load_settings

_SAY = partial(print, flush=True)


def main() -> None:
    """Run it until stopped."""
    redis_port, kafka_port = (int(word) for word in sys.argv[1:])
    settings = load_settings()
    behind = partial(parts_behind, redis_port=redis_port, kafka_port=kafka_port)
    run_stack(settings, _SAY, lambda _settings: _SAY("ready"), behind)


def parts_behind(settings: Settings, redis_port: int, kafka_port: int) -> tuple[Part, ...]:
    """Return the parts of this stack, with its store and broker on other ports."""
    host, _ = broker_address(settings.kafka_bootstrap)
    inner = settings.model_copy(update={"redis_port": redis_port, "kafka_bootstrap": f"{host}:{kafka_port}"})
    broker = replace(
        broker_part(inner), command=tuple(tansu_command(kafka_port, host, advertised=settings.kafka_bootstrap))
    )
    moved = {"valkey": valkey_part(inner), "broker": broker}
    return tuple(moved.get(part.name, part) for part in stack_parts(settings))


if __name__ == "__main__":
    main()
