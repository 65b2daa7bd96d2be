"""A real Prometheus that scrapes one endpoint with this project's rules, on a free port; and the reason when there is none."""

import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from tests.support.promql import RULES
from tests.support.servers import HOST, free_port
from tests.support.wait import wait_for

WHY_NOT = "" if shutil.which("prometheus") else "prometheus is not here: apt-get install prometheus, or PATH to one"


class Prometheus:
    """One server in one folder. Scrapes and evaluates every second, so that a test need not wait for long."""

    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=f"http://{HOST}:{self._port}", timeout=20.0)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(_configuration(target)))
        (folder / "rules").mkdir()
        for path in RULES.glob("*.yaml"):
            (folder / "rules" / path.name).write_text(yaml.safe_dump(_hurried(yaml.safe_load(path.read_text()))))

    def __enter__(self) -> Self:
        """Start it and wait until it is ready."""
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={HOST}:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )
        wait_for(self._is_ready, 60.0, "Prometheus")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self._http.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Evaluate an expression now. Raises when Prometheus refuses it."""
        response = self._http.get("/api/v1/query", params={"query": expr})
        assert response.status_code == 200, f"{expr}: {response.text}"
        found: list[dict[str, Any]] = response.json()["data"]["result"]
        return found

    def unhealthy_rules(self) -> list[str]:
        """Return the rules that were not evaluated yet, or failed, with their errors."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [
            f"{rule['name']}: {rule['health']} {rule.get('lastError', '')}"
            for group in groups
            for rule in group["rules"]
            if rule["health"] != "ok"
        ]

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


def _configuration(target: str) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules/*.yaml"],
        "scrape_configs": [{"job_name": "tailrace", "static_configs": [{"targets": [target]}]}],
    }


def _hurried(rules: dict[str, Any]) -> dict[str, Any]:
    """Evaluate every group at the common interval."""
    groups = [{key: value for key, value in group.items() if key != "interval"} for group in rules["groups"]]
    return {"groups": groups}
