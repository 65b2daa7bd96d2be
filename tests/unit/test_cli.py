"""The operator's door: `pytest tests/unit/test_cli.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from models.registry import BundleStore
from services.settings.settings import inherited_environment
from tests.support.servers import free_port

ROOT = Path(__file__).resolve().parents[2]


def tailrace(*arguments: str, state_dir: Path, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Run a command with these settings."""
    environment = {**inherited_environment(), "TAILRACE_STATE_DIR": str(state_dir), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        env={**environment, **{f"TAILRACE_{name.upper()}": value for name, value in settings.items()}},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def publish(state_dir: Path, version: str, ndcg: float) -> None:
    """Publish a bundle that holds nothing but a report."""
    source = state_dir / f"source-{version}"
    source.mkdir(parents=True)
    metrics = {model: {"ndcg@10": ndcg} for model in ("decoder", "student")}
    (source / "report.json").write_text(json.dumps({"dataset": "ml-100k", "metrics": metrics}))
    store = BundleStore(state_dir / "bundles")
    store.publish(source, version, {})
    store.promote(version)


def test_help_names_every_command(tmp_path: Path) -> None:
    """The door shows what it can do."""
    shown = tailrace("--help", state_dir=tmp_path)

    assert shown.returncode == 0
    for command in ("up", "down", "status", "doctor", "pipeline", "bench", "chaos", "bundles", "promote", "rollback"):
        assert f" {command} " in shown.stdout


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"http_prot": "8000"}, "TAILRACE_HTTP_PROT: unknown setting; did you mean TAILRACE_HTTP_PORT?"),
        ({"http_port": "eighty"}, "TAILRACE_HTTP_PORT"),
        ({"http_port": "70000"}, "TAILRACE_HTTP_PORT"),
    ],
)
def test_a_bad_setting_is_one_line(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    """The key is named, and there is no traceback."""
    refused = tailrace("status", state_dir=tmp_path, **settings)

    assert refused.returncode == 1
    assert words in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


def test_a_bad_option_of_the_pipeline_is_one_line(tmp_path: Path) -> None:
    """The option and the fix are named before anything is started."""
    refused = tailrace("pipeline", "--epochs", "0", state_dir=tmp_path)

    assert refused.returncode == 1
    assert refused.stderr.strip() == "error: --epochs: 0 epochs train nothing; give at least 1 (usual: 25)"


def test_status_and_down_without_a_stack(tmp_path: Path) -> None:
    """Nothing runs: status says so with exit code 1, down with 0."""
    status, down = tailrace("status", state_dir=tmp_path), tailrace("down", state_dir=tmp_path)

    assert (status.returncode, down.returncode) == (1, 0)
    assert "no stack runs" in status.stdout
    assert "no stack runs" in down.stdout


def test_bundles_are_listed_promoted_and_rolled_back(tmp_path: Path) -> None:
    """The list shows the live one and the metrics; promotion and rollback move the pointer."""
    publish(tmp_path, "v1", 0.111)
    publish(tmp_path, "v2", 0.222)

    listed = tailrace("bundles", state_dir=tmp_path)
    back = tailrace("rollback", state_dir=tmp_path)
    live_after_rollback = BundleStore(tmp_path / "bundles").live_version()
    forward = tailrace("promote", "v2", state_dir=tmp_path)

    assert [line.split()[1] for line in listed.stdout.splitlines() if line.split()[0] == "live"] == ["v2"]
    assert all(number in listed.stdout for number in ("0.1110", "0.2220", "ml-100k"))
    assert (back.returncode, live_after_rollback) == (0, "v1")
    assert (forward.returncode, BundleStore(tmp_path / "bundles").live_version()) == (0, "v2")


def test_a_damaged_bundle_does_not_hide_the_others(tmp_path: Path) -> None:
    """Who looks for a version to go back to sees which can be had, and what is wrong with the other."""
    publish(tmp_path, "v1", 0.111)
    publish(tmp_path, "v2", 0.222)
    (tmp_path / "bundles" / "v2" / "report.json").write_text("{}")

    listed = tailrace("bundles", state_dir=tmp_path)

    assert listed.returncode == 0
    assert "0.1110" in listed.stdout
    assert ["live", "v2", "damaged"] in [line.split()[:3] for line in listed.stdout.splitlines()]
    assert "v2/report.json: hash differs" in listed.stdout


def test_what_cannot_be_promoted_is_one_line(tmp_path: Path) -> None:
    """An unknown version, or no earlier one, is an error and not a traceback."""
    unknown = tailrace("promote", "v9", state_dir=tmp_path)
    nothing = tailrace("rollback", state_dir=tmp_path)

    assert (unknown.returncode, nothing.returncode) == (1, 1)
    assert "no bundle v9" in unknown.stderr
    assert "no earlier version" in nothing.stderr
    assert "Traceback" not in unknown.stderr + nothing.stderr


@pytest.mark.parametrize("command", ["up", "status", "rollback", "pipeline"])
def test_a_state_folder_that_cannot_be_is_one_line(tmp_path: Path, command: str) -> None:
    """Whatever the command would do there, the path and the setting are named, and there is no traceback."""
    (tmp_path / "file").touch()

    refused = tailrace(command, state_dir=tmp_path / "file", redis_port=str(free_port()))

    assert refused.returncode == 1
    assert str(tmp_path / "file") in refused.stderr
    assert "TAILRACE_STATE_DIR" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain", "r", "--ca-file", "none.pem"), "error: --ca-file: none.pem"),
        (("bench", "load", "--key-file", "none.key"), "error: secret file none.key"),
        (("chaos", "--fault", "none"), "error: no bundle in"),
    ],
)
def test_what_a_command_needs_and_lacks_is_one_line(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """A missing file or bundle is an error with its name, and not a traceback."""
    refused = tailrace(*arguments, state_dir=tmp_path)

    assert refused.returncode == 1
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr


def test_doctor_names_each_thing_that_it_looks_at(tmp_path: Path) -> None:
    """Python, cores, memory, disk, shared memory, servers and ports are all examined."""
    shown = tailrace("doctor", state_dir=tmp_path)

    for thing in ("Python", "cores", "free memory", "free disk", "state folder", "/dev/shm", "servers", "port"):
        assert thing in shown.stdout
