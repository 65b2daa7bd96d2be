"""The `tailrace` command."""

import json
import re
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from infra.cli.audit import user_name
from infra.cli.main import main
from models.registry import BundleStore
from tests.support.servers import free_port
from tests.support.training.bundles import build_catalogue


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
        (["bench", "serve", "load", "--key-file", "none.key"], {}, "error: secret file none.key"),
        (["bench", "speed"], {}, "there is no benchmark speed; the benchmarks are serve, freshness, "),
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


def test_an_unknown_fault_is_named_with_those_that_exist(tailrace: Run) -> None:
    """By the benchmark behind the command."""
    refused = tailrace("chaos", "--fault", "nope")

    assert refused.code == 2
    assert {"nope", "store-hang", "llm-killed"} <= set(re.findall(r"[a-z-]+", refused.err))


@pytest.mark.parametrize("command", ["up", "status", "rollback", "pipeline"])
def test_an_unusable_state_folder_is_one_line(tailrace: Run, tmp_path: Path, command: str) -> None:
    """Every command names the path and the setting, without a traceback."""
    (tmp_path / "file").touch()

    refused = tailrace(command, state_dir=str(tmp_path / "file"), redis_port=str(free_port()))

    assert refused.code == 1
    assert str(tmp_path / "file") in refused.err
    assert "TAILRACE_STATE_DIR" in refused.err
    assert len(refused.err.strip().splitlines()) == 1


def test_up_names_every_taken_port_before_it_starts_anything(tailrace: Run, tmp_path: Path) -> None:
    """The ports of settings that are taken are named together, each with its setting and its holder."""
    names = ("http_port", "grpc_port", "metrics_port", "redis_port")
    with ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        taken = {name: str(server.getsockname()[1]) for name, server in zip(names, servers, strict=True)}
        refused = tailrace("up", **taken)

    assert refused.code == 1
    for name, number in taken.items():
        assert f"port {number} is taken by" in refused.err
        assert f"TAILRACE_{name.upper()}" in refused.err
    assert not (tmp_path / "logs").exists()


def test_status_and_down_without_a_stack(tailrace: Run) -> None:
    """Without a running stack, status exits with 1 and down with 0."""
    status, down = tailrace("status"), tailrace("down")

    assert (status.code, down.code) == (1, 0)
    assert "no stack runs" in status.out
    assert "no stack runs" in down.out


def test_bundles_are_listed_promoted_and_rolled_back(tailrace: Run, store: BundleStore) -> None:
    """The list shows which versions are live, previous and withdrawn, and the metrics; promotion and rollback move the pointer."""
    listed = tailrace("bundles")
    back = tailrace("rollback", "--reason", "bad lists")
    live_after_rollback = store.live_version()
    after = tailrace("bundles")
    refused = tailrace("promote", "v2")
    forward = tailrace("promote", "v2", "--force")

    states = [[line.split(" v")[0] for line in one.out.splitlines()[2:4]] for one in (listed, after)]
    assert [[line.strip() for line in one] for one in states] == [
        ["previous, reference", "live"],
        ["live, reference", "withdrawn"],
    ]
    assert all(number in listed.out for number in ("0.1110", "0.2220", "ml-100k"))
    assert (back.code, live_after_rollback) == (0, "v1")
    assert f"v2 was withdrawn by {user_name()} at 2" in after.out
    assert "(bad lists)" in after.out
    assert refused.code == 1
    assert f"v2 was withdrawn by {user_name()} at 2" in refused.err
    assert (forward.code, store.live_version()) == (0, "v2")
    assert "withdrawn" not in tailrace("bundles").out


def test_tables_of_bundles_fit_80_columns(tailrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No version or state is cut, and no word but a longer one than its column is broken."""
    store, versions = BundleStore(tmp_path / "bundles"), ("20261124T101112Z-0a1b2c3d", "20261125T101112Z-1a1b2c3d")
    metrics = {model: {"ndcg@10": 0.1, "hr@10": 0.2} for model in ("decoder", "student", "item_knn")}
    for version in versions:
        (tmp_path / version).mkdir()
        report = {"dataset": "events-of-the-shop-2026", "metrics": metrics}
        (tmp_path / version / "report.json").write_text(json.dumps(report))
        store.publish(tmp_path / version, version, {"lineage": {"parents": {"compared_with": versions[0]}}})
        store.promote(version)
    monkeypatch.setenv("COLUMNS", "80")

    listed, shown = tailrace("bundles").out, tailrace("bundles", "diff", *versions).out

    assert max(len(line) for line in (listed + shown).splitlines() if not line.startswith("note: ")) <= 80
    words = (listed + shown).split()
    assert {*versions, "previous,", "reference", "live", "item-kNN", "difference"} <= {*words}
    assert words.count(versions[0]) >= 4, "also as a value of both bundles"
    assert "\N{HORIZONTAL ELLIPSIS}" not in listed + shown


def test_a_person_moves_the_reference(tailrace: Run, store: BundleStore, tmp_path: Path) -> None:
    """The first whole training is it; a person's word is audited and listed with who and when; a rollback from it says which bundle it is now."""
    first = tailrace("bundles")
    moved = tailrace("bundles", "reference", "v2")
    listed = tailrace("bundles")
    unknown = tailrace("bundles", "reference", "v22")
    back = tailrace("rollback")
    refused = tailrace("bundles", "reference", "v2")

    assert "note: v1 is the reference, the first whole training that is kept" in first.out
    assert (moved.code, moved.out) == (0, "v2 is the reference\n")
    assert f"note: v2 is the reference, set by {user_name()} at 2" in listed.out
    assert (unknown.code, "nearest to it are v2" in unknown.err) == (1, True)
    assert "v2 was the reference: now v1 is; `tailrace bundles reference VERSION` sets another" in back.out
    assert (refused.code, "it is no reference; name another" in refused.err) == (1, True)
    audit = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert [one["act"] for one in audit if one.get("version") == "v2"][:1] == ["reference"]


def test_a_rollback_goes_to_a_named_version(tailrace: Run, store: BundleStore, tmp_path: Path) -> None:
    """`--to` names it, and a withdrawn one needs --force. An unknown one is answered with the nearest names."""
    store.publish(tmp_path / "source-v1", "v3", {"recipe": "other"})
    (tmp_path / "source-v1" / "report.json").write_text("{}")
    store.promote("v3")

    unknown = tailrace("rollback", "--to", "v11")
    back = tailrace("rollback", "--to", "v1")
    refused = tailrace("rollback", "--to", "v3")
    forced = tailrace("rollback", "--to", "v3", "--force")

    assert "no bundle v11" in unknown.err
    assert "nearest to it are v1, v" in unknown.err
    assert (back.code, back.out) == (0, "v1 is live; v3 is withdrawn\n")
    assert (refused.code, forced.code, store.live_version()) == (1, 0, "v3")
    assert "--to VERSION goes back to another" in refused.err


def test_two_bundles_are_compared(tailrace: Run, tmp_path: Path) -> None:
    """Data, items, quality, options, gate, size and origin side by side, with the difference; an unknown version is answered with the nearest names."""
    store = BundleStore(tmp_path / "bundles")
    for version, ndcg, items, hidden in (("v1", 0.111, ("a", "b"), 16), ("v2", 0.222, ("b", "c", "d"), 32)):
        source = tmp_path / version
        source.mkdir()
        replace(build_catalogue(len(items)), item_ids=items).save(source / "catalogue.parquet")
        metrics = {"decoder": {"ndcg@10": ndcg, "hr@10": 2 * ndcg}}
        (source / "report.json").write_text(json.dumps({"dataset": "shop", "num_test_users": 40, "metrics": metrics}))
        data = {"num_events": 1_000 * len(items), "newest_event_us": 1_790_000_000_000_000}
        options = {"recipe": {"train": {"hidden_size": hidden, "seed": 0}}, "gate": {"baseline": "best"}}
        lineage = {"options": options, "parents": {"compared_with": "v0"}}
        about = {"data": data, "forced": ["too few users"] * (version == "v2"), "lineage": lineage}
        store.publish(source, version, about)

    shown, unknown = tailrace("bundles", "diff", "v1", "v2"), tailrace("bundles", "diff", "v1", "v3")
    same = tailrace("bundles", "diff", "v1", "v1")

    rows = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert shown.code == 0
    for row in (
        "A B difference",
        "files that serve different",
        "data set shop shop",
        "events 2,000 3,000 +1,000",
        "newest event 2026-09-21 14:13 2026-09-21 14:13",
        "items added 2: c, d",
        "items removed 1: a",
        "test users 40 40",
        "decoder NDCG@10 0.1110 0.2220 +0.1110",
        "published by force no too few users different",
        "compared with v0 v0",
        "option recipe.train.hidden_size 16 32 different",
    ):
        assert row in rows
    assert not any("seed" in row or "baseline" in row for row in rows)
    assert "files that serve identical" in " ".join(same.out.split())
    assert (unknown.code, "no bundle v3" in unknown.err, "nearest to it are v" in unknown.err) == (1, True, True)


def test_what_cannot_be_read_of_a_bundle_leaves_the_rest_of_a_comparison(
    tailrace: Run, store: BundleStore, tmp_path: Path
) -> None:
    """A damaged report is named beside what the manifests say."""
    (tmp_path / "bundles" / "v2" / "report.json").write_text("{}")

    shown = tailrace("bundles", "diff", "v1", "v2")

    assert shown.code == 0
    assert "0.1110" in shown.out
    assert "v2/report.json: hash differs" in shown.out


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
