"""The containers of a compose project, as Docker describes them; starts none."""

import json
from typing import Any

import pytest

from benchmarks.faults.compose import ComposeProcesses
from services.errors import EnvironmentFault

SERVICES = ("redis", "kafka", "worker", "serve", "standby", "edge")
HEALTHY = {"Running": True, "Health": {"Status": "healthy"}}


class Docker:
    """A Docker with one project's containers, healthy but for those named; keeps what it was asked to run."""

    def __init__(self, **states: dict[str, Any]) -> None:
        """Describe the containers as Docker does."""
        self._found = [
            {
                "Id": f"id-of-{service}",
                "Config": {"Labels": {"com.docker.compose.service": service}},
                "State": state,
                "RestartCount": 3,
                "NetworkSettings": {"Ports": {"8000/tcp": [{"HostPort": "18123"}]}},
            }
            for service, state in (dict.fromkeys(SERVICES, HEALTHY) | states).items()
        ]
        self.ran: list[tuple[str, ...]] = []

    def __call__(self, *words: str) -> str:
        """Answer one command."""
        match words[0]:
            case "ps":
                return "\n".join(one["Id"] for one in self._found)
            case "inspect":
                return json.dumps([one for one in self._found if one["Id"] in words])
        self.ran.append(words)
        return ""


@pytest.mark.parametrize(
    ("edge", "is_healthy"),
    [
        (HEALTHY, True),
        ({"Running": True, "Health": {"Status": "starting"}}, False),
        ({"Running": False, "Health": {"Status": "healthy"}}, False),
    ],
)
def test_a_project_is_healthy_when_all_that_requests_need_is(edge: dict[str, Any], is_healthy: bool) -> None:
    """Neither jobs, which have ended, nor the monitoring count."""
    processes = ComposeProcesses("shop", Docker(edge=edge, prepare={"Running": False}))

    assert processes.is_healthy() is is_healthy
    assert processes.num_restarts() == dict.fromkeys(SERVICES, 3)
    assert processes.port(8000) == 18123


def test_a_fault_kills_what_is_in_the_container() -> None:
    """Not the container: Docker starts again what ends by itself, and not what it has killed."""
    docker = Docker()

    ComposeProcesses("shop", docker).kill("serve")

    assert docker.ran == [("exec", "--detach", "id-of-serve", "sh", "-c", "kill -9 -1")]


def test_an_unknown_project_is_an_error() -> None:
    """It names the project."""
    with pytest.raises(EnvironmentFault, match="'shop' has no container of redis"):
        ComposeProcesses("shop", lambda *_: "").is_healthy()
