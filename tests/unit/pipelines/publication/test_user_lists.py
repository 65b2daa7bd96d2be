"""Bulk lists equal the engine's ranking for each user, and a killed run resumes."""

import gzip
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.catalogue import load_catalogue
from pipelines.publication import user_lists
from pipelines.publication.precompute import BatchRanker, batch_engine, outcomes_of
from pipelines.publication.user_lists import ListOptions, read_user_ids, started_version, write_lists
from pipelines.runner.stage import silent
from services.errors import ConfigError
from services.features.schema import LogPosition, UserHistory
from tests.unit.pipelines.conftest import Built

NUM_USERS = 23
OPTIONS = ListOptions(k=5)


def history(number: int, item_ids: tuple[str, ...], disliked: tuple[str, ...] = ()) -> UserHistory:
    """Build a user's row."""
    position = LogPosition("t", 0, number)
    return UserHistory(
        user_id=f"u{number}",
        item_ids=item_ids,
        newest_event_time_ms=1,
        num_events=len(item_ids),
        row_time_us=1,
        position=position,
        disliked_item_ids=disliked,
    )


def read_some(user_ids: Any) -> dict[str, UserHistory]:
    """Return rows with a few items of the ring; u0 has no row, and u1 only unknown items."""
    rows = {"u1": history(1, ("gone",))}
    for number in range(2, NUM_USERS):
        items = tuple(f"i{(number + index) % 30:02}" for index in range(1 + number % 4))
        rows[f"u{number}"] = history(number, items, disliked=(f"i{(number + 9) % 30:02}",))
    return {user_id: rows[user_id] for user_id in user_ids if user_id in rows}


@pytest.fixture
def ranker(built: Built) -> BatchRanker:
    """The ring's decoder."""
    catalogue = load_catalogue(built.trained.tokenized / "catalogue.parquet")
    trained = built.trained
    return BatchRanker(trained.decoder_dir, catalogue, "v1", trained.prompt)


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of users that takes several batches."""
    monkeypatch.setattr(user_lists, "_BATCH", 5)
    path = tmp_path / "users.txt"
    path.write_text("".join(f"u{number}\n\n" for number in range(NUM_USERS)))
    return path


def write(ranker: BatchRanker, users: Path, out: Path, options: ListOptions = OPTIONS, progress: Any = silent) -> int:
    return write_lists(
        ranker, np.ones(len(ranker.catalogue.item_ids), dtype=bool), users, read_some, options, out, progress
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_list_is_what_the_engine_ranks_for_the_user_alone(ranker: BatchRanker, users: Path, tmp_path: Path) -> None:
    """Lists follow the file's order, without seen and disliked items; users without known items get popular items."""
    out, catalogue = tmp_path / "lists.jsonl", ranker.catalogue
    assert write(ranker, users, out) == NUM_USERS

    rows = rows_of(out)
    assert [row["user_id"] for row in rows] == read_user_ids(users)
    assert [row["tier"] for row in rows[:2]] == ["popular"] * 2
    for row in rows[2:]:
        stored = read_some([row["user_id"]])[row["user_id"]]
        engine, indices = batch_engine(ranker, 1), catalogue.indices(stored.item_ids)
        allowed = catalogue.allowed(excluded_item_ids=stored.item_ids + stored.disliked_item_ids)
        prompt = ranker.prompt.tokens(catalogue, indices)
        engine.add_rank("alone", prompt, k=5, allowed=allowed)
        (alone,) = outcomes_of(engine)
        assert row["item_ids"] == [catalogue.item_ids[index] for index in alone.item_indices.tolist()]
        assert row["scores"] == pytest.approx(alone.scores.tolist(), abs=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lists.jsonl", "users.txt"]


def killed_in_the_second_batch(ranker: BatchRanker, users: Path, out: Path) -> None:
    """Write lists in a process that is killed after two batches."""
    user_lists._BATCH = 5

    def kill(done: int, _total: int, _words: str) -> None:
        """End this process after two batches."""
        if done == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    write(ranker, users, out, progress=kill)


def test_a_killed_run_goes_on_and_no_row_is_half(ranker: BatchRanker, users: Path, tmp_path: Path) -> None:
    """The file appears only when complete; a resumed run needs equal inputs and gives the result of a single run."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "lists.jsonl"
    write(ranker, users, whole)
    child = multiprocessing.get_context("spawn").Process(target=killed_in_the_second_batch, args=(ranker, users, out))
    child.start()
    child.join(120)

    assert child.exitcode == -signal.SIGKILL
    assert not out.exists()
    assert started_version(out) == "v1"
    names = users.read_text()
    for options, version, text, words in (
        (ListOptions(k=4), "v1", names, "k"),
        (OPTIONS, "v2", names, "bundle_version"),
        (OPTIONS, "v1", "u1\n", "users"),
    ):
        users.write_text(text)
        with pytest.raises(ConfigError, match=f"other {words};"):
            write(replace(ranker, bundle_version=version), users, out, options)
    users.write_text(names)
    with (tmp_path / "lists.jsonl.part").open("ab") as part:
        part.write(b'{"user_id": "u1')
    assert write(ranker, users, out) == NUM_USERS - 10
    assert out.read_bytes() == whole.read_bytes()


def test_a_file_that_another_run_writes_is_refused(ranker: BatchRanker, users: Path, tmp_path: Path) -> None:
    """Two runs would write over each other's rows; after the first has ended, the second succeeds."""
    out = tmp_path / "lists.jsonl"
    second: list[ConfigError] = []

    def progress(*_: object) -> None:
        with pytest.raises(ConfigError, match="--out: another run writes") as refused:
            write(ranker, users, out)
        second.append(refused.value)

    write(ranker, users, out, progress=progress)
    rows = rows_of(out)
    write(ranker, users, out)

    assert second
    assert len(rows) == len(read_user_ids(users))
    assert rows_of(out) == rows


def test_filters_and_seen_items_are_honoured(ranker: BatchRanker, users: Path, tmp_path: Path) -> None:
    """Unavailable and excluded items are never listed; seen items are listed if requested."""
    out, hidden = tmp_path / "lists.jsonl", ranker.catalogue.item_ids[0]
    available = np.array([item_id != hidden for item_id in ranker.catalogue.item_ids])
    options = ListOptions(k=20, exclude_item_ids=("i07",), with_seen=True)

    write_lists(ranker, available, users, read_some, options, out, silent)

    rows = rows_of(out)
    listed = {item_id for row in rows for item_id in row["item_ids"]}
    assert not listed & {hidden, "i07"}
    assert any(set(row["item_ids"]) & set(read_some([row["user_id"]])[row["user_id"]].item_ids) for row in rows[2:])


@pytest.mark.parametrize(
    ("content", "users"),
    [
        (b"u1\n\n u2 \r\nu1", ["u1", "u2", "u1"]),
        ("u1\nü2\n".encode("utf-16"), ["u1", "ü2"]),
        ("ü1\n".encode("latin-1"), ["ü1"]),
        (b"\xef\xbb\xbfuser_id\nu1\n", ["u1"]),
        (b"7.0\n8\nnan\n", ["7", "8", "nan"]),
        (b"1.0\n1.5\nbeta\n", ["1.0", "1.5", "beta"]),
        (b'"u,1"\nu,2\n', ["u,1", "u,2"]),
        (b"name,user_id\nA,u1\nB,u2\n", ["u1", "u2"]),
        (b"User ID;name\nu1;A\n", ["u1"]),
        (b'{"user_id": "u1"}\n{"user_id": 7}\n', ["u1", "7"]),
        (gzip.compress(b"u1\n", mtime=0), ["u1"]),
        (b"user|1\n", ["user|1"]),
        (b"user|1\nuser|2\n", ["user|1", "user|2"]),
        (b"{3F25-04E0}\n{3F25-04E1}\n", ["{3F25-04E0}", "{3F25-04E1}"]),
        (b'[{"user_id": "u1"}]', ["u1"]),
        (b"auth0|17\n", ["auth0|17"]),
        (b"Customer ID\n17\n18\n", ["17", "18"]),
        (b'"kundennummer"\n17\n', ["kundennummer", "17"]),
        (b'"uid=a,ou=x"\n"uid=b,ou=x"\n', ["uid=a,ou=x", "uid=b,ou=x"]),
        (b"ann\nu,2\n", ["ann", "u,2"]),
        (b"sep=;\nName;User ID\nAnn;u1\n", ["u1"]),
        (b"guest\nann\n17\n", ["guest", "ann", "17"]),
        (b"kundennummer,email\n17,a@x\n18,b@x\n", None),
        (b"Kunde;Stadt\n17;Ulm\n", None),
        (b"17,a@x\n18,b@x\n", None),
        (b"u1,u2,u3\n", None),
        (b"kundennummer\n17\n18\n", None),
        (b"customer\nu17\n", None),
        (b"customer_id,email\nu1,a@x\nu2,b@x\n", None),
        (b"email;Customer ID\na@x;u1\n", None),
        (b"", None),
        (b"\n\n", None),
        (b"user_id\n", None),
        (b"1.5\n2.5\n", None),
        (b"PK\x03\x04", None),
    ],
)
def test_a_file_of_users_is_decoded_as_tables_are(content: bytes, users: list[str] | None, tmp_path: Path) -> None:
    """Ids are read from lines or a table column in any encoding; a file without users or their column is rejected."""
    path = tmp_path / "users.txt"
    path.write_bytes(content)
    if users is not None:
        assert read_user_ids(path) == users
        return

    with pytest.raises(ConfigError, match="--users"):
        read_user_ids(path)
