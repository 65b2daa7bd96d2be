"""docker-compose.yml against the code and against its own promises: `pytest tests/unit/infra/test_docker_compose_file.py`."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.docker.credentials import make_missing
from services.settings.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docker-compose.yml").read_text()
FILE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
ONE_SHOT = {"keys", "prepare", "pipeline"}
OURS = ONE_SHOT | {"worker", "serve", "serve-gpu", "standby", "edge"}
WRITABLE_ROOT = {"kafka"}
"""The image writes its configuration at each start."""

every_service = pytest.mark.parametrize("name", SERVICES)


def default_of(value: Any) -> str:
    """Fill `${NAME:-default}` with its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


def mounted(name: str) -> dict[str, tuple[str, str]]:
    """What a service mounts: by source, the place and the mode."""
    found = {}
    for volume in SERVICES[name].get("volumes", []):
        source, place, *mode = volume.split(":")
        found[source] = (place, mode[0] if mode else "rw")
    return found


@pytest.mark.parametrize("name", sorted(OURS - {"keys", "edge"}))
def test_the_given_values_are_valid_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of our roles reads its variables, as it does at its start, without complaint."""
    for key, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(key, default_of(value))

    assert load_settings().redis_host == "redis"


@every_service
def test_images_are_pinned(name: str) -> None:
    """Each image has a tag with a version, and never `latest`."""
    repository, _, tag = SERVICES[name]["image"].partition(":")

    assert repository
    assert re.match(r"v?\d+\.\d+\.\d+", tag), tag


@every_service
def test_nobody_is_root_or_may_become_it(name: str) -> None:
    """A fixed user that is not root, no capability, no new privilege, an init, and a root that cannot be written."""
    service = SERVICES[name]

    assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["read_only"] is (name not in WRITABLE_ROOT)
    assert "privileged" not in service


@every_service
def test_resources_are_limited(name: str) -> None:
    """Memory, processors, processes and logs of each service are bounded, with keys that both Compose versions obey."""
    service = SERVICES[name]

    assert {"mem_limit", "cpus", "pids_limit"} <= service.keys()
    assert float(default_of(service["cpus"])) <= 2, "an engine refuses more processors than the host has"
    assert service["logging"]["options"]["max-size"]


@every_service
def test_what_stays_is_watched_and_what_ends_is_not_started_again(name: str) -> None:
    """Servers have a health check and come back; one-shot jobs have neither."""
    service = SERVICES[name]

    if name in ONE_SHOT:
        assert service["healthcheck"] == {"disable": True}
        assert "restart" not in service
    else:
        assert service["healthcheck"]["test"]
        assert service["healthcheck"]["start_period"]
        assert service["restart"] == "unless-stopped"


@every_service
def test_the_doors_and_the_watchers_are_published_on_loopback_only(name: str) -> None:
    """By default nothing listens on an address that others reach, and store, broker and metrics are not published at all."""
    published = [default_of(port) for port in SERVICES[name].get("ports", [])]

    assert all(port.startswith("127.0.0.1:") for port in published)
    assert bool(published) == (name in {"edge", "prometheus", "grafana"})


def test_ports_are_those_of_the_settings() -> None:
    """What is published, checked and scraped are the ports on which the code listens by default."""
    settings = Settings()
    scraped = (ROOT / "infra" / "prometheus" / "prometheus.yml").read_text()
    doors = {
        "edge": (settings.http_port, settings.grpc_port),
        "serve": (settings.inner_http_port, settings.inner_grpc_port),
        "standby": (settings.standby_http_port, settings.standby_grpc_port),
    }

    assert [port.rpartition(":")[2] for port in SERVICES["edge"]["ports"]] == [str(port) for port in doors["edge"]]
    for name, (http, grpc) in doors.items():
        rest = f"tcp:{http}" if name == "edge" else f"http:{http}/healthz"
        assert SERVICES[name]["healthcheck"]["test"][4:] == [
            rest,
            f"tcp:{grpc}",
            f"http:{settings.metrics_port}/healthz",
        ]
    for name in (*doors, "worker"):
        assert f"{name}:{settings.metrics_port}" in scraped


def test_the_edge_calls_services_that_are_there() -> None:
    """On a network that leads nowhere else."""
    words = SERVICES["edge"]["command"]

    assert words == ["edge", "--ray-host", "serve", "--standby-host", "standby"]
    assert FILE["networks"]["doors"] == {"internal": True}
    assert all("doors" in SERVICES[name]["networks"] for name in ("edge", "serve", "standby"))
    assert "data" not in SERVICES["edge"]["networks"]


def test_store_and_broker_have_no_way_in_or_out() -> None:
    """They are on an internal network alone."""
    for name in ("redis", "kafka"):
        assert SERVICES[name]["networks"] == ["data"]
    assert FILE["networks"]["data"] == {"internal": True}
    assert FILE["networks"]["watch"] == {"internal": True}


def test_each_secret_is_where_it_is_needed_and_nowhere_else() -> None:
    """A volume per secret; only the job that makes them can write, and no server sees the operator's key itself."""
    readers = {
        "redis-secret": {"redis", "prepare", "pipeline", "worker", "standby", "serve", "serve-gpu"},
        "kafka-secret": {"kafka", "prepare", "pipeline", "worker", "standby", "serve", "serve-gpu"},
        "doors-secret": {"standby", "serve", "serve-gpu"},
        "operator-secret": set(),
        "grafana-secret": {"grafana"},
    }

    for secret, expected in readers.items():
        having = {name: mounted(name)[secret][1] for name in SERVICES if secret in mounted(name)}
        assert having == {"keys": "rw"} | dict.fromkeys(expected, "ro"), secret


def test_every_secret_that_is_named_is_made(tmp_path: Path) -> None:
    """Each path below /secrets in the file is one that the first job writes, and its folder is mounted there."""
    for folder in ("redis", "kafka", "doors", "keys", "grafana"):
        (tmp_path / folder).mkdir()
    made = {f"/secrets/{path.relative_to(tmp_path)}" for path in make_missing(tmp_path)}

    for name, service in SERVICES.items():
        text = yaml.safe_dump({key: value for key, value in service.items() if key != "volumes" and name != "edge"})
        for path in set(re.findall(r"/secrets/[\w./]+", text)):
            assert path in made, path
            assert path.rpartition("/")[0] in {place for place, _ in mounted(name).values()}, (name, path)


def test_only_the_worker_and_the_jobs_write_the_state() -> None:
    """The doors, which strangers talk to, read it."""
    modes = {name: mounted(name)["state"][1] for name in SERVICES if "state" in mounted(name)}

    assert modes == {"prepare": "rw", "pipeline": "rw", "worker": "rw"} | dict.fromkeys(
        ("standby", "serve", "serve-gpu"), "ro"
    )


def test_no_secret_lies_in_the_repository_or_in_the_image() -> None:
    """What the first job makes is in volumes; were such a file here, git and the image would leave it out."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    seen = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]

    assert not [path for path in listed if re.search(r"(password|\.key|\.acl|jaas\.conf|\.pem)$", path)]
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert not {".git", ".env", ".tailrace"} & set(seen)
