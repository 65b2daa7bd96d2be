"""Prometheus scrapes every service with metrics in every environment; alerts on other services could not fire."""

import pytest
import yaml

from services.settings.settings import Settings
from tests.support.manifests import OVERLAYS, find, matches, pods, render
from tests.support.pages import ROOT

PORT = Settings.model_construct().metrics_port


def targets_of(name: str) -> set[str]:
    """Return the targets of the `tailrace` job in a configuration."""
    jobs = yaml.safe_load((ROOT / f"infra/prometheus/{name}").read_text())["scrape_configs"]
    (job,) = [job for job in jobs if job["job_name"] == "tailrace"]
    return {target for config in job["static_configs"] for target in config["targets"]}


def test_compose_scrapes_each_service_with_metrics() -> None:
    """Prometheus scrapes the services whose health check uses the metrics endpoint, and shares a network with them."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    with_metrics = {
        name: service
        for name, service in services.items()
        if f"http:{PORT}/healthz" in service["healthcheck"].get("test", ())
    }

    assert targets_of("prometheus.yml") == {f"{name}:{PORT}" for name in with_metrics.keys() - {"serve-gpu"}}
    assert all("watch" in service["networks"] for service in with_metrics.values())
    assert services["serve-gpu"]["networks"]["watch"] == {"aliases": ["serve"]}, "it is scraped under that name"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_scrapes_every_pod_that_stays(overlay: str) -> None:
    """A PodMonitor selects the pod, and the monitored port exists."""
    things = render(overlay)
    monitors = [monitor["spec"] for monitor in find(things, "PodMonitor")]
    jobs = {job["metadata"]["name"] for kind in ("CronJob", "Job") for job in find(things, kind)}
    for pod in pods(things):
        if pod.labels.get("app.kubernetes.io/name") != "tailrace" or pod.name in jobs:
            continue
        wanted = {
            end["port"]
            for monitor in monitors
            if matches(monitor["selector"], pod.labels)
            for end in monitor["podMetricsEndpoints"]
        }
        assert wanted & {port["name"] for container in pod.containers() for port in container.get("ports", ())}, (
            pod.name
        )
