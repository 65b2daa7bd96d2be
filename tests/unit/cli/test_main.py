"""The `tailrace` command."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from models.registry import BundleStore
from services.cli.main import main
from tests.support.servers import free_port


@dataclass
class Completed:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Completed]


@pytest.fixture
def tailrace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, with these settings and a state folder of its own."""
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, **settings: str) -> Completed:
        for name, value in settings.items():
            monkeypatch.setenv(f"TAILRACE_{name.upper()}", value)
        monkeypatch.setattr(sys, "argv", ["tailrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Completed(int(ended.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    """Two published bundles that hold nothing but a report; the second is live."""
    store = BundleStore(tmp_path / "bundles")
    for version, ndcg in (("v1", 0.111), ("v2", 0.222)):
        source = tmp_path / f"source-{version}"
        source.mkdir()
        metrics = {model: {"ndcg@10": ndcg} for model in ("decoder", "student")}
        (source / "report.json").write_text(json.dumps({"dataset": "ml-100k", "metrics": metrics}))
        store.publish(source, version, {})
        store.promote(version)
    return store


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (["status"], {"http_port": "eighty"}, "TAILRACE_HTTP_PORT"),
        (
            ["pipeline", "--epochs", "0"],
            {},
            "error: --epochs: 0 epochs train nothing; give at least 1, or leave it out for the recipe's number",
        ),
        (["promote", "v9"], {}, "no bundle v9"),
        (["rollback"], {}, "no earlier version"),
        (["explain", "r", "--ca-file", "none.pem"], {}, "error: --ca-file: none.pem"),
        (["bench", "load", "--key-file", "none.key"], {}, "error: secret file none.key"),
        (["chaos", "--fault", "none"], {}, "error: no bundle in"),
    ],
)
def test_an_error_is_one_line(tailrace: Run, arguments: list[str], settings: dict[str, str], words: str) -> None:
    """A bad setting, option, version or file is named on one line with exit code 1, without a traceback."""
    refused = tailrace(*arguments, **settings)
    *progress, error = refused.err.strip().splitlines()

    assert refused.code == 1
    assert words in error
    assert progress == (["starting a separate stack ..."] if arguments[0] == "chaos" else [])


@pytest.mark.parametrize("command", ["up", "status", "rollback", "pipeline"])
def test_an_unusable_state_folder_is_one_line(tailrace: Run, tmp_path: Path, command: str) -> None:
    """Every command names the path and the setting, without a traceback."""
    (tmp_path / "file").touch()

    refused = tailrace(command, state_dir=str(tmp_path / "file"), redis_port=str(free_port()))

    assert refused.code == 1
    assert str(tmp_path / "file") in refused.err
    assert "TAILRACE_STATE_DIR" in refused.err
    assert len(refused.err.strip().splitlines()) == 1


def test_status_and_down_without_a_stack(tailrace: Run) -> None:
    """Without a running stack, status exits with 1 and down with 0."""
    status, down = tailrace("status"), tailrace("down")

    assert (status.code, down.code) == (1, 0)
    assert "no stack runs" in status.out
    assert "no stack runs" in down.out


def test_bundles_are_listed_promoted_and_rolled_back(tailrace: Run, store: BundleStore) -> None:
    """The list shows the live version and the metrics; promotion and rollback move the pointer."""
    listed = tailrace("bundles")
    back = tailrace("rollback")
    live_after_rollback = store.live_version()
    forward = tailrace("promote", "v2")

    assert [line.split()[1] for line in listed.out.splitlines() if line.split()[0] == "live"] == ["v2"]
    assert all(number in listed.out for number in ("0.1110", "0.2220", "ml-100k"))
    assert (back.code, live_after_rollback) == (0, "v1")
    assert (forward.code, store.live_version()) == (0, "v2")


def test_a_damaged_bundle_does_not_hide_the_others(tailrace: Run, store: BundleStore, tmp_path: Path) -> None:
    """A damaged bundle is listed as damaged with its fault, beside the versions that are intact."""
    (tmp_path / "bundles" / "v2" / "report.json").write_text("{}")

    listed = tailrace("bundles")

    assert listed.code == 0
    assert "0.1110" in listed.out
    assert ["live", "v2", "damaged"] in [line.split()[:3] for line in listed.out.splitlines()]
    assert "v2/report.json: hash differs" in listed.out


def test_doctor_prints_every_check(tailrace: Run) -> None:
    """Python, cores, memory, disk, shared memory, servers and ports are all examined."""
    shown = tailrace("doctor")

    for check in ("Python", "cores", "free memory", "free disk", "state folder", "/dev/shm", "servers", "port"):
        assert check in shown.out
