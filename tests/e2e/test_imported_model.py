"""A recommender that was trained elsewhere on the whole stack: import, pipeline, events, deadline, fault, rollback."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.registry.store import BundleStore
from tests.support.foreign.recommenders import Recommender as Made
from tests.support.foreign.recommenders import random_sids, sid_names, write_csv_rows, write_model, write_tokenizer
from tests.support.stacks.stack import Stack, rest_items
from tests.support.training.synthetic import raw_events, raw_items
from tests.support.wait import wait_for

TABLES = ("--events", "events.csv", "--items", "items.jsonl")
SMALL = ("--epochs", "1", "--student-epochs", "2", "--force", "--no-live-log", "--no-refit")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Stack, str]]:
    """A stack that serves our own decoder first and an imported decoder next; with the first version."""
    sids = {f"i{row:02d}": sid for row, sid in enumerate(random_sids(30).values())}
    tokenizer = write_tokenizer(tmp_path / "model", sid_names())
    sizes = {"hidden_size": 256, "intermediate_size": 1_024, "num_hidden_layers": 8, "head_dim": 64}
    write_model(tmp_path / "model", "qwen2", tokenizer.get_vocab_size(), **sizes)
    (tmp_path / "Ring.index.json").write_text(json.dumps(sids))
    write_csv_rows(Made(tmp_path / "model", tmp_path / "Ring.index.json", sids), tmp_path / "test.csv", 6)
    raw_events(40, 30, 12).write_csv(tmp_path / "events.csv")
    raw_items(30).write_ndjson(tmp_path / "items.jsonl")
    tables = [str(tmp_path / word) if "." in word else word for word in TABLES]
    stack = Stack(tmp_path / "state")
    rows = ["--index", str(tmp_path / "Ring.index.json"), "--examples", str(tmp_path / "test.csv")]
    for arguments in (
        ("pipeline", *tables, *SMALL),
        ("import", "model", str(tmp_path / "model"), *rows, "--as", "ring"),
        ("pipeline", *tables, *SMALL, "--decoder", "ring", "--distil-positions", "40"),
    ):
        done = stack.command(*arguments, timeout_s=280.0)
        assert done.returncode == 0, done.stdout + done.stderr
    first, _ = sorted(BundleStore(stack.settings.bundle_root).versions())
    stack.start()
    yield stack, first
    stack.close()


@pytest.mark.grid  # tests/integration/pipelines/test_imported_decoder.py holds all but the stack around it
def test_an_imported_model_is_served_like_any_bundle(served: tuple[Stack, str]) -> None:
    """It answers and excludes a click; the student answers within 50 ms and without replicas; a rollback ends it."""
    stack, first = served
    history = [f"i{number:02d}" for number in range(8)]

    def by_the_llm() -> dict[str, object] | None:
        answer = stack.recommend(recent_item_ids=history, deadline_ms=8_000)
        return answer if answer["tier"] == "llm" else None

    answer = wait_for(by_the_llm, 90.0, "an answer by the imported decoder")
    assert answer["bundle_version"] != first
    clicked = rest_items(stack.known("u001", deadline_ms=8_000))[0]
    assert clicked not in rest_items(stack.sees_click("u001", clicked))
    assert stack.recommend(recent_item_ids=history, deadline_ms=50)["tier"] == "student"

    stack.kill_processes(stack.replica_pids(lambda name: name.startswith("llm")))
    assert stack.recommend(recent_item_ids=history, deadline_ms=1_000)["tier"] == "student"
    assert stack.command("rollback").returncode == 0
    wait_for(lambda: stack.recommend(recent_item_ids=history)["bundle_version"] == first, 90.0, "the version before it")
