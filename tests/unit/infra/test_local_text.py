"""The text model in operator commands: checked before startup, shown by status."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from infra.local.commands.status import text_health
from infra.local.servers.text import ready_text
from services.errors import CheckpointError
from services.settings.settings import Settings
from tests.support.engine.checkpoints import write_checkpoint

BROKEN = {
    "model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n",
    "config.json": b"{}",
    "tokenizer.json": b"version https://git-lfs.github.com/spec/v1\n",
    "tokenizer_config.json": b'{"chat_template": 7, "eos_token"',
}
WRITES_TEXT = """
import sys
from prometheus_client import REGISTRY
from services.observability.metrics import ProcessMetrics
ProcessMetrics(REGISTRY, "text")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_text_path_becomes_an_absolute_folder(tmp_path: Path) -> None:
    """A missing path and an unloadable folder are rejected; settings without a text model are unchanged."""
    settings = Settings(text_path=str(write_checkpoint(tmp_path)))

    assert ready_text(settings, Console(quiet=True)).text_path == str(tmp_path)
    assert ready_text(Settings(), Console(quiet=True)) == Settings()
    with pytest.raises(CheckpointError, match="nowhere"):
        ready_text(Settings(text_path="nowhere", cache_dir=tmp_path), Console(quiet=True))
    for name, content in BROKEN.items():
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"TAILRACE_TEXT_PATH: .*{name}"):
            ready_text(settings, Console(quiet=True))
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin only"):
        ready_text(settings, Console(quiet=True))


def test_status_reads_text_s_health_from_its_metrics(tmp_path: Path) -> None:
    """Text is healthy while a process of the part `text` lives, and down if it is configured without a process."""
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
