"""The parts of the stack: `pytest tests/unit/infra/test_parts.py`."""

from pathlib import Path

import pytest

from infra.local.guide import grpc_call, rest_call
from infra.local.parts import broker_address, stack_parts
from infra.local.supervisor import STOP_ORDER
from services.errors import ConfigError
from services.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Default settings in a folder of their own."""
    return Settings(state_dir=tmp_path)


def test_needs_come_before_their_users(settings: Settings) -> None:
    """Every need is an earlier part, so a start from left to right always ends."""
    earlier: set[str] = set()
    for part in stack_parts(settings):
        assert set(part.needs) <= earlier
        earlier.add(part.name)


def test_doors_close_before_what_they_stand_on(settings: Settings) -> None:
    """All parts are in the stopping order, users before their needs."""
    for part in stack_parts(settings):
        assert all(STOP_ORDER.index(part.name) < STOP_ORDER.index(need) for need in part.needs)


def test_every_part_is_asked_and_every_port_has_its_setting(settings: Settings) -> None:
    """No part is believed without a question, and a taken port can be moved by a setting that exists."""
    known = {f"TAILRACE_{name.upper()}" for name in Settings.model_fields}

    for part in stack_parts(settings):
        assert part.probes
        assert {port.setting for port in part.ports} <= known


@pytest.mark.parametrize("bootstrap", ["", "kafka", "kafka:", "kafka:port", "a:1,b:2", "kafka:0", "kafka:70000"])
def test_an_embedded_broker_needs_one_address(bootstrap: str) -> None:
    """Anything but host:port is refused by the setting's name."""
    with pytest.raises(ConfigError, match="TAILRACE_KAFKA_BOOTSTRAP"):
        broker_address(bootstrap)


def test_the_printed_calls_name_the_doors(settings: Settings) -> None:
    """The calls go to the configured ports and ask for the given user."""
    moved = settings.model_copy(update={"http_port": 1234, "grpc_port": 5678})

    assert ":1234/v1/recommendations" in rest_call(moved, "u7")
    assert "127.0.0.1:5678" in grpc_call(moved, "u7", "python")
    assert all("u7" in call for call in (rest_call(moved, "u7"), grpc_call(moved, "u7", "python")))
