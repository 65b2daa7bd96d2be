"""Replicas of the names in a test module's settings."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from services.items.live_items import LiveItems
from services.items.snapshot import Positions, write_snapshot
from services.llm.ranking import deployment
from services.llm.ranking.deployment import LlmDeployment
from services.llm.serving.card import limits_of
from services.settings.settings import Settings

limits_measured_once = cache(limits_of)


@pytest.fixture
def start_replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Settings], LlmDeployment]]:
    """A function that starts a replica; the machine's limits are measured once for all tests."""
    monkeypatch.setattr(deployment, "limits_of", limits_measured_once)
    started: list[LlmDeployment] = []

    def start(settings: Settings) -> LlmDeployment:
        write_snapshot(settings.items_snapshot, LiveItems(), Positions("", {}))  # no replica ranks without states
        started.append(LlmDeployment(settings, settings.served_names))
        return started[-1]

    yield start
    for replica in started:
        replica.__del__()


@pytest.fixture
def replica(settings: Settings, start_replica: Callable[[Settings], LlmDeployment]) -> LlmDeployment:
    """A replica of all names that holds no model."""
    return start_replica(settings)
