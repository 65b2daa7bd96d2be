"""The `tailrace` command."""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import structlog

from infra.cli.session import running_settings, user_name
from models.registry.canary import CanaryStage
from models.registry.store import BundleStore
from tests.support.training.bundles import build_catalogue
from tests.unit.infra.cli.conftest import Run


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., None]:
    """Publish and promote a bundle with a report, and with a catalogue if `items` is given."""
    store = BundleStore(tmp_path / "bundles")

    def publish(version: str, ndcg: float, dataset: str = "ml-100k", items: Sequence[str] = (), **about: Any) -> None:
        source = tmp_path / f"source-{version}"
        source.mkdir()
        both = {"ndcg@10": ndcg, "hr@10": 2 * ndcg}
        metrics = {"decoder": both, "student": both, "item_knn": {"ndcg@10": ndcg}}
        (source / "report.json").write_text(json.dumps({"dataset": dataset, "num_test_users": 40, "metrics": metrics}))
        if items:
            replace(build_catalogue(len(items)), item_ids=items).save(source / "catalogue.parquet")
        store.publish(source, version, about)
        store.promote(version)

    return publish


@pytest.fixture
def store(publish: Callable[..., None], tmp_path: Path) -> BundleStore:
    """Two published bundles; v2 is live."""
    publish("v1", 0.111)
    publish("v2", 0.222)
    return BundleStore(tmp_path / "bundles")


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (["status"], {"http_port": "eighty"}, "TAILRACE_HTTP_PORT"),
        (
            ["pipeline", "--epochs", "0"],
            {},
            "error: --epochs: 0 is out of range; give at least 1",
        ),
        (["promote", "v9"], {}, "no bundle v9"),
        (["rollback"], {}, "nothing is live as default"),
        (["explain", "r", "--ca-file", "none.pem"], {}, "error: --ca-file: none.pem"),
        (["bench", "speed"], {}, "unknown benchmark speed; the benchmarks are serve, freshness, "),
        (["chaos", "--fault", "none"], {}, "error: no bundle in"),
    ],
)
def test_an_error_is_one_line(tailrace: Run, arguments: list[str], settings: dict[str, str], words: str) -> None:
    """An invalid setting, option, version or file gives a single error line and exit code 1, without a traceback."""
    refused = tailrace(*arguments, **settings)
    *progress, error = refused.err.strip().splitlines()

    assert refused.code == 1
    assert words in error
    assert progress == (["starting a separate stack, direct ..."] if arguments[0] == "chaos" else [])


def test_an_unknown_fault_is_named_with_those_that_exist(tailrace: Run) -> None:
    """The benchmark behind the command lists the valid faults."""
    refused = tailrace("chaos", "--fault", "nope")

    assert refused.code == 2
    assert {"nope", "store-hang", "llm-killed"} <= set(re.findall(r"[a-z-]+", refused.err))


def test_up_names_every_taken_port_before_it_starts_anything(tailrace: Run, tmp_path: Path) -> None:
    """All taken ports of the settings are reported together, each with its setting and the process that holds it."""
    names = ("http_port", "grpc_port", "metrics_port", "redis_port")
    with ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        taken = {name: str(server.getsockname()[1]) for name, server in zip(names, servers, strict=True)}
        refused = tailrace("up", **taken)

    assert refused.code == 1
    for name, number in taken.items():
        assert re.search(rf"port {number} is taken by .*pid {os.getpid()}\b.*TAILRACE_{name.upper()}", refused.err), (
            refused.err
        )
    assert not (tmp_path / "logs").exists()


def test_the_version_is_that_of_the_package(tailrace: Run) -> None:
    """`tailrace --version` prints the installed version."""
    assert tailrace("--version").out.strip() == f"tailrace {metadata.version('tailrace')}"


def test_status_down_and_doctor_without_a_stack(tailrace: Run) -> None:
    """Without a running stack, status exits with 1, down exits with 0, and doctor checks the machine."""
    status, down, doctor = tailrace("status"), tailrace("down"), tailrace("doctor")

    assert (status.code, down.code) == (1, 0)
    assert all("no stack runs" in result.out for result in (status, down))
    for check in ("Python", "cores", "free memory", "free disk", "state folder", "/dev/shm", "servers", "port"):
        assert check in doctor.out


def test_bundles_are_listed_promoted_and_rolled_back(tailrace: Run, store: BundleStore) -> None:
    """The list shows states and metrics of versions; promotion and rollback change the live version."""
    listed = tailrace("bundles")
    back = tailrace("rollback", "--to", "v1", "--reason", "bad lists")
    live_after_rollback = store.live_version()
    after = tailrace("bundles")
    refused = tailrace("promote", "v2")
    forward = tailrace("promote", "v2", "--force")

    states = [[line.split(" v")[0].strip() for line in result.out.splitlines()[2:4]] for result in (listed, after)]
    assert states == [["previous, reference", "live"], ["live, reference", "withdrawn"]]
    assert all(number in listed.out for number in ("0.1110", "0.2220", "ml-100k"))
    assert (back.out, live_after_rollback) == ("v1 is live; v2 is withdrawn\n", "v1")
    assert f"v2 was withdrawn by {user_name()} at 2" in after.out
    assert "(bad lists)" in after.out
    assert (refused.code, f"v2 was withdrawn by {user_name()} at 2" in refused.err) == (1, True)
    assert (forward.code, store.live_version()) == (0, "v2")
    assert "withdrawn" not in tailrace("bundles").out


def test_a_rollback_tells_that_it_ended_a_release(
    tailrace: Run, store: BundleStore, publish: Callable[..., None]
) -> None:
    """The release was compared with the version that is withdrawn."""
    publish("v3", 0.333)
    store.release("v1", [CanaryStage(0.5, 0.0)], 0)

    assert "the release of v1 has ended" in tailrace("rollback").out
    assert "release" not in tailrace("rollback").out


def test_a_live_version_whose_folder_is_missing_is_listed(tailrace: Run, store: BundleStore, tmp_path: Path) -> None:
    """The list shows the live version as damaged and names the missing bundle."""
    for version in ("v1", "v2"):
        shutil.rmtree(tmp_path / "bundles" / version)
    listed = tailrace("bundles")

    assert ["live", "v2", "damaged"] in [line.split()[:3] for line in listed.out.splitlines()]
    assert "note: no bundle v2" in listed.out


def test_names_move_apart_and_are_on_record(tailrace: Run, store: BundleStore) -> None:
    """Names have independent live versions and history; versions can be withdrawn, shown, verified and collected."""
    made = tailrace("bundles", "promote", "v1", "--name", "mail")
    listed = tailrace("bundles", "list")
    refused = tailrace("bundles", "withdraw", "v1", "--name", "mail")
    withdrawn = tailrace("bundles", "withdraw", "v2", "--name", "mail", "--reason", "wrong data")
    again = tailrace("bundles", "promote", "v2", "--name", "mail")
    history = tailrace("bundles", "history", "--name", "mail")
    shown = json.loads(tailrace("bundles", "show", "v1").out)

    assert (made.out, store.live_version(), store.named("mail").live_version()) == ("v1 is live as mail\n", "v2", "v1")
    assert "note: v1 is live as mail" in listed.out
    assert (refused.code, "v1 is live" in refused.err) == (1, True)
    assert (withdrawn.out, again.code, "(wrong data)" in again.err) == ("v2 is withdrawn\n", 1, True)
    assert [line.split()[1:3] for line in history.out.splitlines()] == [["promote", "v1"], ["withdraw", "v1"]]
    assert history.out.endswith(f"by {user_name()}: v2: wrong data\n")
    assert (shown["manifest"]["version"], "metrics" in shown["report"]) == ("v1", True)
    assert "files are as they were published" in tailrace("bundles", "verify", "v1").out
    assert tailrace("bundles", "gc", "--keep", "1").out == "nothing to remove\n"
    assert tailrace("bundles", "promote", "v1", "--name", "A B").code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bundles", "gc", "--keep", "0"), "--keep"),
        (("bundles", "gc", "--keep", "-1"), "--keep"),
        (("bundles", "show", "v11"), "nearest to it are v1"),
        (("rollback",), "`tailrace bundles` lists all"),
        (("rollback", "--to", "v1", "--name", "mail"), "nothing is live as mail; names with a version: default"),
        (("import", "events", "absent.csv"), "no file absent.csv"),
        (("up", "--items", "absent.csv"), "error: --items: no file absent.csv; "),
        (("up", "--text", "absent"), "error: --text: absent: neither a folder, nor a GGUF file"),
        (("bundles", "history", "--name", "defualt"), "no version was ever live as defualt; names with a version: "),
    ],
)
def test_a_wrong_word_is_refused_with_its_fix(
    tailrace: Run, store: BundleStore, words: tuple[str, ...], message: str
) -> None:
    """The error names what is wrong before anything is connected to or removed."""
    store.withdraw("v1")

    refused = tailrace(*words)

    assert refused.code
    assert message in refused.err


def test_a_name_that_never_was_live_has_no_history(tailrace: Run, store: BundleStore) -> None:
    """A mistyped name is refused with the names that are."""
    refused = tailrace("bundles", "history", "--name", "defualt")

    assert (refused.code, "no version was ever live as defualt; names with a version: default" in refused.err) == (
        1,
        True,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("recommend", "--users", "users.txt", "--out"),
        ("erase", "--users", "users.txt", "--out"),
        ("import", "events", "events.csv", "--table"),
        ("profile", "train", "--json"),
        ("experiment", "report", "table", "--json"),
    ],
    ids=lambda words: words[0],
)
def test_a_file_that_cannot_be_made_is_refused_before_anything_is_done(
    tailrace: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The error names the option of a file whose path is a folder or whose folder is missing, before other errors."""
    for path, problem in ((tmp_path, "is a folder"), (tmp_path / "none" / "out", "no folder")):
        refused = tailrace(*words, str(path))

        assert (refused.code, words[-1] in refused.err, problem in refused.err) == (1, True, True), refused.err


def test_a_person_moves_the_reference(tailrace: Run, store: BundleStore, tmp_path: Path) -> None:
    """The reference defaults to the first full training; a change is audited, and a rollback from it is reported."""
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
    assert (refused.code, "it cannot be the reference; name another" in refused.err) == (1, True)
    audit = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert [entry["act"] for entry in audit if entry.get("version") == "v2"][:1] == ["reference"]


def test_two_bundles_are_compared(tailrace: Run, publish: Callable[..., None]) -> None:
    """The comparison shows both bundles with differences; an unknown version is answered with the nearest versions."""
    for version, ndcg, items, hidden in (("v1", 0.111, ("a", "b"), 16), ("v2", 0.222, ("b", "c", "d"), 32)):
        options = {"recipe": {"train": {"hidden_size": hidden, "seed": 0}}, "gate": {"baseline": "best"}}
        about = {
            "data": {"num_events": 1_000 * len(items), "newest_event_us": 1_790_000_000_000_000},
            "forced": ["too few users"] * (version == "v2"),
            "lineage": {"options": options, "parents": {"compared_with": "v0"}},
        }
        publish(version, ndcg, "shop", items, **about)

    shown, unknown = tailrace("bundles", "diff", "v1", "v2"), tailrace("bundles", "diff", "v1", "v3")
    same = tailrace("bundles", "diff", "v1", "v1")

    rows = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert shown.code == 0
    assert {
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
    } <= set(rows)
    assert not any("seed" in row or "baseline" in row for row in rows)
    assert "files that serve identical" in " ".join(same.out.split())
    assert (unknown.code, "no bundle v3" in unknown.err, "nearest to it are v" in unknown.err) == (1, True, True)


def test_a_damaged_bundle_hides_neither_the_others_nor_the_rest_of_a_comparison(
    tailrace: Run, store: BundleStore, tmp_path: Path
) -> None:
    """A corrupt bundle is listed with its error, and can be compared by the data of its manifest."""
    (tmp_path / "bundles" / "v2" / "report.json").write_text("{}")

    listed, compared = tailrace("bundles"), tailrace("bundles", "diff", "v1", "v2")

    for shown in (listed, compared):
        assert (shown.code, "0.1110" in shown.out, "v2/report.json: hash differs" in shown.out) == (0, True, True)
    assert ["live", "v2", "damaged"] in [line.split()[:3] for line in listed.out.splitlines()]


@pytest.mark.parametrize("command", ["pipeline", "precompute"])
def test_tables_are_refused_before_a_store_is_started(tailrace: Run, tmp_path: Path, command: str) -> None:
    """A wrong column costs no start of the embedded store."""
    events, items = tmp_path / "events.csv", tmp_path / "items.csv"
    events.write_text("user,item_id,event_time\nann,p1,1795262400\n")
    items.write_text("item_id,title\np1,Lamp\n")

    done = tailrace(command, "--events", str(events), "--items", str(items))

    assert (done.code, "--column user=user_id" in done.err) == (1, True)
    assert not (tmp_path / "valkey").exists()


def test_a_command_prints_log_lines_of_warnings_only(capfd: pytest.CaptureFixture[str]) -> None:
    """Its own sentences are the output; steps of the libraries below it are not."""
    running_settings()

    structlog.get_logger().info("items_followed")
    structlog.get_logger().warning("items_lost")

    lines = capfd.readouterr().out.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["items_lost"]
