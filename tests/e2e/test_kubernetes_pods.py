"""Pods of the manifests, run as containers: text by vLLM, and many names and tenants, behind their Services' names."""

import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from models.registry.store import BundleStore
from services.settings.settings import inherited_environment
from tests.support.engine.checkpoints import write_checkpoint
from tests.support.gateway.keys import bearer
from tests.support.helm import helm
from tests.support.manifests import ROOT, Thing, parse, pods, with_component
from tests.support.servers import free_port
from tests.support.stacks.pods import Pods, why_no_pods
from tests.support.stacks.stack import Stack, admitted
from tests.support.wait import wait_for

pytestmark = [pytest.mark.grid, pytest.mark.timeout(2_400)]
SERVERS = ("tailrace-features-redis", "tailrace-kafka")
DOORS = ("tailrace-stream", "tailrace-standby", "tailrace-edge")
KEYS = "tailrace-api-keys"
GREEDY = {"model": "text", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
CHAT = {**GREEDY, "messages": [{"role": "user", "content": "a river"}]}
DEADLINE_MS = 4_000


@contextmanager
def started(things: list[Thing], folder: Path, names: tuple[str, ...], **secrets: dict[str, str]) -> Iterator[Pods]:
    """Start these pods one after another; skip without Docker or without an image."""
    images = {container["image"] for pod in pods(things) if pod.name in names for container in pod.containers()}
    if reason := why_no_pods(sorted(images)):
        pytest.skip(reason)
    running = Pods(things, folder, secrets, f"pods-{uuid.uuid4().hex[:8]}")
    try:
        yield running
    finally:
        running.close()


def published(stack: Stack, root: Path, *names: str) -> dict[str, str]:
    """Publish the trained bundle once for each name; return the version by name."""
    trained, store = BundleStore(stack.settings.bundle_root).live(), BundleStore(root)
    about = {name: value for name, value in trained.manifest.items() if name not in {"version", "files"}}
    for number, name in enumerate(names):
        store.publish(trained.path, f"v{number}", about)
        store.named(name).promote(f"v{number}")
    opened(root)
    return {name: f"v{number}" for number, name in enumerate(names)}


def opened(root: Path) -> None:
    """Let every user read the files and write the folders, as files of a shared volume belong to the pods' user."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)


def recommend(pods: Pods, key: str | None = None, **body: Any) -> httpx.Response:
    """Request a recommendation through the Service of REST and gRPC."""
    url = f"{pods.url('tailrace-doors', 'http')}/v1/recommendations"
    asked = {"user_id": "u", "k": 3, "deadline_ms": DEADLINE_MS, **body}
    return admitted(lambda: httpx.post(url, json=asked, headers=bearer(key), timeout=30))


def test_text_comes_from_the_vllm_component(stack: Stack, tmp_path: Path) -> None:
    """Through edge and standby a chat is vLLM's; its deadline holds; killed, it costs the text only."""
    (tmp_path / "overlay").mkdir()
    things = with_component("dev", "vllm", tmp_path / "overlay")
    with started(things, tmp_path / "volumes", ("tailrace-vllm", *SERVERS, *DOORS)) as running:
        published(stack, running.claim("tailrace-shared") / "bundles", "default")
        model = running.claim("tailrace-shared") / "text"
        opened(write_checkpoint(model, max_positions=4_096, scale=0.1, head_dim=32))
        running.start(*SERVERS, "tailrace-vllm", *DOORS)
        doors, vllm = running.url("tailrace-doors", "http"), running.url("tailrace-vllm", "http")

        def chat(url: str, **changes: Any) -> httpx.Response:
            headers = {"x-deadline-ms": str(changes.pop("deadline_ms", 60_000))}
            return admitted(
                lambda: httpx.post(f"{url}/v1/chat/completions", json={**CHAT, **changes}, headers=headers, timeout=90)
            )

        written, direct = (chat(url).json()["choices"][0]["message"]["content"] for url in (doors, vllm))
        assert written == direct
        late = chat(doors, max_tokens=1_000, deadline_ms=1_500)
        assert late.status_code == 504 or late.json()["choices"][0]["stop_reason"] == "deadline"
        running.kill("tailrace-vllm")
        assert chat(doors).status_code == 503
        assert len(recommend(running).json()["items"]) == 3
        running.until_ready("tailrace-standby")


def example_values() -> Thing:
    """Return the values of the page about many models."""
    text = (ROOT / "docs/many-models.md").read_text()
    values: Thing = yaml.safe_load(re.findall(r"---\n(# values.yaml.*?)```", text, re.DOTALL)[0])
    return values


def test_tenants_of_the_page_s_values_are_apart_until_one_is_deleted(stack: Stack, tmp_path: Path) -> None:
    """Each name has its bundle and each tenant its users; a deleted tenant's data is gone, by the job's pod."""
    own = {"apiKeys": {"secret": KEYS}, "stream": {"workers": 1}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({**example_values(), **own}))
    chart, files = ROOT / "infra/kubernetes/chart", tmp_path / "files"
    options = ("--values", chart / "values-trial.yaml", "--values", tmp_path / "values.yaml")
    rendered = helm("template", "tailrace", chart, "--namespace", "tailrace", "--kube-version", "1.32", *options)
    assert rendered.returncode == 0, rendered.stderr

    def secret() -> dict[str, str]:
        return {path.name: path.read_text() for path in files.glob("*.json")}

    shop, chief = (operated(files, *words).stdout.strip() for words in MADE)
    with started(
        [thing for thing in parse(rendered.stdout) if thing],
        tmp_path / "volumes",
        (*SERVERS, *DOORS),
        **{KEYS: secret()},
    ) as running:
        versions = published(stack, running.claim("tailrace-shared") / "bundles", "default", "fr", "acme.default")
        running.start(*SERVERS, *DOORS)

        answers = {
            "default": recommend(running, chief),
            "fr": recommend(running, chief, surface="fr"),
            "acme.default": recommend(running, shop),
        }
        assert {name: answer.json()["bundle_version"] for name, answer in answers.items()} == versions
        event = {"user_id": "u", "item_id": "50"}
        sent = httpx.post(f"{running.url('tailrace-doors', 'http')}/v1/events", json=event, headers=bearer(shop))
        assert sent.status_code in {200, 202}, sent.text
        wait_for(lambda: recommend(running, shop).json()["newest_event_time_ms"], 60.0, "the tenant's event")
        assert recommend(running, chief).json()["newest_event_time_ms"] is None

        marked = operated(files, "tenants", "delete", "acme", "--yes")
        assert "repeat it where the stack runs" in marked.stderr
        running.update_secret(KEYS, secret())
        delete = ("tailrace-train", "tailrace", "tenants", "delete", "acme", "--yes")
        wait_for(lambda: "is deleted" in running.run(*delete), 300.0, "the deletion")
        wait_for(lambda: recommend(running, shop).status_code == 401, 30.0, "the end of the tenant's key")
        assert recommend(running, chief).status_code == 200


MADE = (
    ("keys", "new", "--id", "shop", "--tenant", "acme", "--scope", "recommend", "--scope", "events"),
    ("keys", "new", "--id", "chief", "--scope", "recommend"),
)


def operated(files: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `tailrace` on an operator's machine, which has the files of the Secret, and neither Redis nor Kafka."""
    files.mkdir(exist_ok=True)
    given = {
        "TAILRACE_STATE_DIR": str(files / "state"),
        "TAILRACE_API_KEYS_FILE": str(files / "api-keys.json"),
        "TAILRACE_TENANTS_FILE": str(files / "tenants.json"),
        "TAILRACE_REDIS_PORT": str(free_port()),
    }
    command = [sys.executable, "-m", "infra.cli.main", *words]
    if not (files / "tenants.json").exists() and words[0] != "tenants":
        operated(files, "tenants", "new", "acme")
    environment = {**inherited_environment(), **given}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
