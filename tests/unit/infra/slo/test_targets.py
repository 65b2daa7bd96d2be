"""Prometheus scrapes every service with metrics in every environment; alerts on other services could not fire."""

import re

import pytest
import yaml

from infra.local.parts import stack_parts
from services.settings.settings import Settings
from tests.support.manifests import OVERLAYS, find, matches, pods, render
from tests.support.pages import ROOT

PORT = Settings.model_construct().metrics_port
FOLDER = "PROMETHEUS_MULTIPROC_DIR"
NOT_OURS = {"valkey", "broker", "metrics", "serve"}
"""Servers without our metrics, the endpoint itself, and Ray's driver; Ray passes the folder to the replicas."""
LONG_LIVED = {"services.stream", "infra.local.standby", "infra.local.edge", "pipelines.release"}


def targets_of(name: str) -> set[str]:
    """Return the targets of the `tailrace` job in a configuration."""
    jobs = yaml.safe_load((ROOT / f"infra/prometheus/{name}").read_text())["scrape_configs"]
    (job,) = [one for one in jobs if one["job_name"] == "tailrace"]
    return {target for config in job["static_configs"] for target in config["targets"]}


def test_compose_scrapes_each_service_with_metrics() -> None:
    """Prometheus scrapes the services whose health check uses the metrics endpoint, and shares a network with them."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    with_metrics = {
        name: one for name, one in services.items() if f"http:{PORT}/healthz" in one["healthcheck"].get("test", ())
    }

    assert targets_of("prometheus.yml") == {f"{name}:{PORT}" for name in with_metrics.keys() - {"serve-gpu"}}
    assert all("watch" in one["networks"] for one in with_metrics.values())
    assert services["serve-gpu"]["networks"]["watch"] == {"aliases": ["serve"]}, "it is scraped under that name"


def test_the_embedded_stack_has_one_target_with_every_process_behind_it() -> None:
    """All processes share the folder that the single endpoint aggregates."""
    parts = [part for part in stack_parts(Settings()) if part.name not in NOT_OURS]

    assert targets_of("local.yml") == {f"localhost:{PORT}"}
    assert {part.name for part in parts} >= {"worker", "release", "standby", "edge"}
    assert [part.name for part in parts if FOLDER not in part.environment] == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_scrapes_every_pod_that_stays(overlay: str) -> None:
    """A PodMonitor selects the pod, and the monitored port exists."""
    things = render(overlay)
    monitors = [one["spec"] for one in find(things, "PodMonitor")]
    jobs = {one["metadata"]["name"] for kind in ("CronJob", "Job") for one in find(things, kind)}
    for pod in pods(things):
        if pod.labels.get("app.kubernetes.io/name") != "tailrace" or pod.name in jobs:
            continue
        wanted = {
            end["port"]
            for one in monitors
            if matches(one["selector"], pod.labels)
            for end in one["podMetricsEndpoints"]
        }
        assert wanted & {port["name"] for one in pod.containers() for port in one.get("ports", ())}, pod.name


def test_machines_share_the_folder_too() -> None:
    """Every process that the page starts on a machine writes to the folder of that machine's endpoint."""
    lines = re.findall(r"^(.*)python -m (\S+)", (ROOT / "docs/machines.md").read_text(), re.MULTILINE)
    started = {module: before for before, module in lines if module in LONG_LIVED}

    assert started.keys() == LONG_LIVED
    assert [module for module, before in started.items() if FOLDER not in before] == []
