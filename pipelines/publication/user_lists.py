"""Writes lists of many users into one file, as for a mailing: ranked by the engine in batches, without the gateway.

    OUT              JSON Lines, a row for each user in the given order; appears when complete
    OUT.part         finished rows, locked by the run; truncated to whole rows when a run resumes
    OUT.part.json    progress, and the identity of the run

A row is {user_id, item_ids, scores, tier, bundle_version}. The decoder ranks for users with catalogue items in their
history (`llm`), popularity for all other users (`popular`). Lists exclude the user's dislikes, hidden items and items
that the options exclude, as well as the user's history unless the bundle learned repeats or the options include it. A
killed run resumes after the last batch on disk, with the bundle that it started with.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import polars as pl

from models.files import file_sha256, rename_durably
from pipelines.publication.precompute import BatchRanker, batch_engine, outcomes_of
from pipelines.runner.stage import Progress
from pipelines.tables.id_files import read_ids
from services.contracts.recommend import MAX_K, Tier
from services.errors import ConfigError
from services.features.schema import USER_HISTORY, UserHistory

_BATCH = 512
ReadHistories = Callable[[Sequence[str]], Mapping[str, UserHistory]]
"""Users' rows by ID; users without a row are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Content of each list: `k` items of any of `categories`, without the excluded items.

    `with_seen` includes seen items; None: as the bundle learned.
    """

    k: int = 10
    categories: tuple[str, ...] = ()
    exclude_item_ids: tuple[str, ...] = ()
    with_seen: bool | None = None

    def __post_init__(self) -> None:
        """Reject options that cannot be listed. Raises ConfigError naming the option."""
        if not 1 <= self.k <= MAX_K:
            raise ConfigError(f"--k: {self.k} is out of range; give 1 to {MAX_K}")


@dataclass(frozen=True, slots=True)
class _Done:
    """Progress of a run: rows and bytes on disk."""

    num_rows: int
    num_bytes: int


def read_user_ids(path: Path) -> list[str]:
    """Read the users of a file: one ID per line, or a table with a column user_id. Raises ConfigError."""
    return read_ids(path, "user_id", "--users")


def table_reader(table: Path) -> ReadHistories:
    """Return a reader of an offline table with one row per user. Raises ConfigError if it is missing."""
    if not table.is_file():
        raise ConfigError(f"--histories offline: no file {table}; run `tailrace pipeline`, or read the store")

    def read(user_ids: Sequence[str]) -> Mapping[str, UserHistory]:
        rows = pl.scan_parquet(table).filter(pl.col("user_id").is_in(list(user_ids))).collect()
        return {row.user_id: row for row in USER_HISTORY.from_columns(rows.to_dict(as_series=False))}

    return read


def started_version(out: Path) -> str | None:
    """Return the bundle that an unfinished run of this file started with; None if there is none."""
    about = _read_progress(out)
    return None if about is None else about["run"]["bundle_version"]


def write_lists(
    ranker: BatchRanker,
    available: np.ndarray,
    users: Path,
    read_histories: ReadHistories,
    options: ListOptions,
    out: Path,
    progress: Progress,
) -> int:
    """Write the file, and return the number of rows that this run added.

    Raises ConfigError if an unfinished file belongs to another run, or another run writes it now.

    Args:
        ranker: The bundle.
        available: (num_items,) bool by the bundle's index: whether an item is not hidden.
        users: One ID per line.
        read_histories: Reads the rows of a batch.
        options: Content of the lists.
        out: The file.
        progress: Called after each batch.
    """
    user_ids = read_user_ids(users)
    run = asdict(options) | {"bundle_version": ranker.bundle_version, "users": file_sha256(users)}
    lists = _Lists(ranker, available, options)
    with _part(out).open("ab") as part:
        _lock(part, out)
        done = _resume(out, json.loads(json.dumps(run)))
        num_before = done.num_rows
        part.truncate(done.num_bytes)
        part.seek(done.num_bytes)
        while batch := user_ids[done.num_rows : done.num_rows + _BATCH]:
            rows = lists.of(batch, read_histories(list(dict.fromkeys(batch))))
            part.write("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode())
            part.flush()
            os.fsync(part.fileno())
            done = _Done(done.num_rows + len(batch), part.tell())
            _save_progress(out, done, run)
            progress(done.num_rows, len(user_ids), f"{done.num_rows} of {len(user_ids)} users")
    rename_durably(_part(out), out)
    _progress_file(out).unlink()
    return done.num_rows - num_before


class _Lists:
    """Ranks batches with one engine."""

    def __init__(self, ranker: BatchRanker, available: np.ndarray, options: ListOptions) -> None:
        self._ranker, self._catalogue, self._k = ranker, ranker.catalogue, options.k
        self._catalogue.check_filters(options.categories or None, None)
        shown = self._catalogue.allowed(
            categories=options.categories or None, excluded_item_ids=options.exclude_item_ids
        )
        self._shown = shown & available
        self._shows_seen = ranker.repeats if options.with_seen is None else options.with_seen
        self._engine = batch_engine(ranker, _BATCH)
        self._popular = np.argsort(-self._catalogue.popularity, kind="stable")
        self._popular = self._popular[self._shown[self._popular]]

    def of(self, user_ids: Sequence[str], rows: Mapping[str, UserHistory]) -> Iterator[dict[str, Any]]:
        """Yield the users' rows in their order."""
        ranked: dict[str, tuple[list[int], list[float]]] = {}
        requests: dict[str, tuple[list[int], list[int]]] = {}
        for user_id, row in rows.items():
            if history := self._catalogue.indices(row.item_ids):
                prompt = self._ranker.prompt.tokens(self._catalogue, history)
                unwanted, num = self._unwanted(row), self._ranker.num_ranked(self._k)
                self._engine.add_rank(user_id, prompt, k=num, allowed=self._shown, excluded=unwanted)
                requests[user_id] = history, unwanted
        for outcome in outcomes_of(self._engine):
            history, unwanted = requests[outcome.request_id]
            allowed = self._shown.copy()
            allowed[unwanted] = False
            best, scores_k = self._ranker.mixed(history, outcome, allowed, self._k)
            ranked[outcome.request_id] = best.tolist(), scores_k.tolist()
        for user_id in user_ids:
            tier = Tier.LLM if user_id in ranked else Tier.POPULAR
            indices, scores = ranked[user_id] if user_id in ranked else self._most_popular(rows.get(user_id))
            yield {
                "user_id": user_id,
                "item_ids": [self._catalogue.item_ids[index] for index in indices],
                "scores": [round(score, 6) for score in scores],
                "tier": tier.value,
                "bundle_version": self._ranker.bundle_version,
            }

    def _unwanted(self, row: UserHistory) -> list[int]:
        seen = () if self._shows_seen else row.item_ids
        return self._catalogue.indices((*seen, *row.disliked_item_ids))

    def _most_popular(self, row: UserHistory | None) -> tuple[list[int], list[float]]:
        unwanted = set() if row is None else set(self._unwanted(row))
        indices = list(islice((index for index in self._popular.tolist() if index not in unwanted), self._k))
        return indices, self._catalogue.popularity[indices].tolist()


def _lock(part: IO[bytes], out: Path) -> None:
    """Lock the open file until it is closed. Raises ConfigError if another run holds it, or has just finished it."""
    try:
        fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_current = os.path.samestat(os.fstat(part.fileno()), _part(out).stat())
    except (BlockingIOError, FileNotFoundError):
        is_current = False
    if not is_current:
        raise ConfigError(f"--out: another run writes {_part(out)}; wait for its end, or give another file")


def _resume(out: Path, run: dict[str, Any]) -> _Done:
    """Return the progress of this run. Raises ConfigError naming the differences from an unfinished file."""
    about = _read_progress(out)
    if about is None:
        return _Done(0, 0)
    if differing := [name for name, value in run.items() if about["run"].get(name) != value]:
        raise ConfigError(
            f"--out: {_part(out)} belongs to a run with another {', '.join(differing)}; finish that run, or remove "
            f"the file and {_progress_file(out).name}"
        )
    return _Done(about["num_rows"], about["num_bytes"])


def _read_progress(out: Path) -> dict[str, Any] | None:
    try:
        about: dict[str, Any] = json.loads(_progress_file(out).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return about if _part(out).is_file() and _part(out).stat().st_size >= about["num_bytes"] else None


def _save_progress(out: Path, done: _Done, run: Mapping[str, Any]) -> None:
    scratch = _progress_file(out).with_suffix(".tmp")
    scratch.write_text(json.dumps({"num_rows": done.num_rows, "num_bytes": done.num_bytes, "run": run}))
    rename_durably(scratch, _progress_file(out))


def _part(out: Path) -> Path:
    return out.with_name(f"{out.name}.part")


def _progress_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.part.json")
