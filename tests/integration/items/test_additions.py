"""The command that adds new items to a stack's bundles, on a real broker, and the process that runs it periodically."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from infra.cli.pipeline import read_items
from models.registry.store import BundleStore
from pipelines.publication.cold_start import publish_items
from pipelines.release.additions import COMMAND, Additions
from pipelines.tables.files import Frame
from pipelines.tables.reader import ItemTable
from services.settings.settings import Settings, inherited_environment
from tests.integration.items.test_item_follower import Process, send
from tests.support.servers import Server
from tests.support.wait import wait_for
from tests.unit.pipelines.publication.test_cold_start import ITEMS


def test_items_of_topic_and_snapshot_are_offered_to_each_name(broker: Server, tmp_path: Path) -> None:
    """A name without a bundle that takes items is reported with the reason, without a publication."""
    settings = Settings(state_dir=tmp_path, kafka_bootstrap=broker.address, names="default,mail")
    store = BundleStore.of(settings)
    publish_items(store, ItemTable(Frame(ITEMS, "items.csv")), datetime(2026, 1, 2, tzinfo=UTC))
    process = Process(broker, settings.items_snapshot, is_worker=True)
    process.follower.start(30.0)
    process.follower.stop()
    environment = {**inherited_environment(), **settings.as_environment()}

    def run() -> tuple[int, str]:
        ended = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=120, check=False)
        return ended.returncode, ended.stdout + ended.stderr

    nothing_new = run()
    send(broker, (b"n1", b'{"title":"New hat"}'))
    refused = run()

    assert nothing_new[0] == 1
    assert "default:" not in nothing_new[1]
    assert "mail: nothing published as mail" in nothing_new[1]
    assert refused[0] == 1
    assert "default: " in refused[1]
    assert "has no models that could rank new items" in refused[1]
    assert len(store.versions()) == 1


def test_lists_hide_the_items_of_the_topic_or_name_the_time_of_the_snapshot(
    broker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tailrace recommend` reads changes since the snapshot; without the broker it says what it does not know."""
    settings = Settings(state_dir=tmp_path, kafka_bootstrap=broker.address)
    process = Process(broker, settings.items_snapshot, is_worker=True)
    process.follower.start(30.0)
    send(broker, (b"i01", b'{"available":false}'))
    wait_for(lambda: process.hides("i01"), what="the first change")
    process.follower.stop()
    send(broker, (b"i02", b'{"available":false}'))

    hidden, printed = [], []
    for end in (broker.kill, settings.items_snapshot.unlink, lambda: None):
        items = read_items(settings)
        hidden.append([items.hides(item_id) for item_id in ("i01", "i02")])
        printed.append(" ".join(capsys.readouterr().out.split()))
        end()

    assert hidden == [[True, True], [True, False], [False, False]]
    assert "hidden" not in printed[0]
    assert "items are hidden as at 20" in printed[1]
    assert "no item is hidden: the topic items cannot be read; start the stack" in printed[2]


def test_the_same_failure_in_a_row_is_logged_once(tmp_path: Path) -> None:
    """Only one process runs at a time; its last line is logged, and stopping the owner ends it."""
    script = tmp_path / "said.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "number = len(path.read_text()) if path.exists() else 0\n"
        "path.write_text('x' * (number + 1))\n"
        "sys.exit(None if number == 2 and not print('1 new items') else 'no title')\n"
    )
    runs = tmp_path / "runs"
    additions = Additions(10.0, 0.0, (sys.executable, str(script), str(runs)))

    def num_runs() -> int:
        return len(runs.read_text()) if runs.exists() else 0

    with capture_logs() as logged:
        additions.look(9.0)
        assert additions._running is None
        for number in range(1, 5):
            additions.look(10.0 * number)
            wait_for(lambda number=number: num_runs() == number)
            wait_for(lambda: additions.look(0.0) or additions._running is None)
    assert [(line["event"], line["said"]) for line in logged] == [
        ("items_not_added", "no title"),
        ("items_added", "1 new items"),
        ("items_not_added", "no title"),
    ]


def test_a_process_that_ends_in_the_middle_ends_its_command(tmp_path: Path) -> None:
    """No process keeps running after the stop."""
    pid_file = tmp_path / "pid"
    wait = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    additions = Additions(1.0, 0.0, (sys.executable, "-c", wait))
    additions.look(1.0)
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    additions.close()

    assert not Path(f"/proc/{pid_file.read_text()}").exists()
    never = Additions(0.0, 0.0, (sys.executable, "-c", "raise SystemExit(1)"))
    never.look(1e9)
    assert never._running is None
