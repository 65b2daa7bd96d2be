"""`tailrace profile train|rank|text`: recorded by torch's profiler on a published bundle, then read like any trace."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from models.registry.store import BundleStore
from services.errors import ConfigError
from tests.support.training.bundles import publish_bundle


@pytest.fixture
def _bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder with a live bundle."""
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path))
    publish_bundle(tmp_path / "bundles", "v1")


@pytest.mark.parametrize(
    ("subject", "dearest"), [("train", "aten::"), ("rank", "tailrace::compiled"), ("text", "tailrace::compiled")]
)
@pytest.mark.usefixtures("_bundle")
def test_what_is_recorded_is_accounted_for(tmp_path: Path, subject: str, dearest: str) -> None:
    """The parts add up to the span, the trace stays in the requested folder, and measured limits give a roofline."""
    out, kept = tmp_path / "out.json", tmp_path / "kept.json.gz"

    done = CliRunner().invoke(
        app, ["profile", subject, "--device", "cpu", "--json", str(out), "--keep", str(kept)], catch_exceptions=False
    )
    again = CliRunner().invoke(app, ["profile", subject, "--trace", str(kept)], catch_exceptions=False)

    profile = json.loads(out.read_text())
    parts = ("compute_us", "communication_exposed_us", "copy_exposed_us", "idle_us")
    assert sum(profile[name] for name in parts) == pytest.approx(profile["span_us"])
    assert sum(profile["shares"].values()) == pytest.approx(1)
    assert any(operation["name"].startswith(dearest) for operation in profile["operations"])
    assert any(operation["roofline_share"] is not None for operation in profile["operations"])
    assert done.stdout.splitlines()[-1] == profile["sentence"]
    assert again.stdout == done.stdout


@pytest.mark.usefixtures("_bundle")
def test_text_runs_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    """Only text takes a folder in the Hugging Face layout; train and rank refuse it, since they use the live bundle."""
    folder = str(BundleStore(tmp_path / "bundles").live().decoder_dir)

    done = CliRunner().invoke(app, ["profile", "text", "--model", folder, "--device", "cpu"], catch_exceptions=False)

    assert done.stdout.startswith("rank 0, CPU: ")
    with pytest.raises(ConfigError, match="--model: rank runs the live bundle's decoder"):
        CliRunner().invoke(app, ["profile", "rank", "--model", folder], catch_exceptions=False)
