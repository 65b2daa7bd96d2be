"""An import delivers accepted rows in batches and records its progress after each; a killed import resumes there.

    <folder>/<name>.json    number of delivered rows, and their hash

An import first compares the source's rows with those delivered before. If they match, as in a source that only grew, it
resumes after them; otherwise it starts from the beginning. That is safe: an item or event that was delivered before
counts once.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import polars as pl

from models.files import write_durably

BATCH_ROWS = 1_000
_MODULUS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Number of rows delivered, and their hash."""

    num_rows: int = 0
    digest: int = 0

    def behind(self, rows: pl.DataFrame) -> "Progress":
        """Return the progress after more rows, independent of batch boundaries."""
        return Progress(
            num_rows=self.num_rows + rows.height, digest=(self.digest + _sum(rows, self.num_rows)) % _MODULUS
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """Result of an import: rows delivered in total and before this run, and whether a changed source restarted it."""

    num_rows: int
    num_before: int
    is_again: bool


class Import:
    """Delivers the rows that are not delivered yet.

    Args:
        open_rows: Returns frames of accepted rows from the first row, in the same order each time.
        deliver: Returns once a batch is durable. Raises DependencyUnavailable.
        moved: Called after each batch with the number of rows delivered.
        progress_file: File that records the progress.
    """

    def __init__(
        self,
        open_rows: Callable[[], Iterable[pl.DataFrame]],
        deliver: Callable[[pl.DataFrame], None],
        moved: Callable[[int], object],
        progress_file: Path,
    ) -> None:
        self._open_rows = open_rows
        self._deliver = deliver
        self._moved = moved
        self._file = progress_file

    def run(self) -> ImportResult:
        """Deliver the remaining rows. Raises the errors of source and delivery."""
        before = _read_progress(self._file)
        left = self._behind(before)
        done = before if left is not None else Progress()
        begun_at, is_again = done.num_rows, left is None
        for rows in left if left is not None else self._open_rows():
            for batch in rows.iter_slices(BATCH_ROWS):
                self._deliver(batch)
                done = done.behind(batch)
                write_durably(self._file, json.dumps(asdict(done)).encode())
                self._moved(done.num_rows)
        return ImportResult(num_rows=done.num_rows, num_before=begun_at, is_again=is_again)

    def _behind(self, before: Progress) -> Iterator[pl.DataFrame] | None:
        """Return the rows after the delivered rows; None if the delivered rows have changed."""
        rows, passed, rest = iter(self._open_rows()), Progress(), None
        while passed.num_rows < before.num_rows:
            frame = next(rows, None)
            if frame is None:
                return None
            missing = before.num_rows - passed.num_rows
            passed, rest = passed.behind(frame.head(missing)), frame.slice(missing)
        return None if passed.digest != before.digest else _chained(rest, rows)


def _chained(first: pl.DataFrame | None, rows: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    if first is not None and first.height:
        yield first
    yield from rows


def _sum(rows: pl.DataFrame, offset: int) -> int:
    """Return the sum of the rows' hashes; each hash includes the row's position."""
    return int(sum(row_hashes(rows.with_row_index("place", offset)).to_list())) % _MODULUS


def row_hashes(rows: pl.DataFrame) -> pl.Series:
    """Return a hash (UInt64) of each row's values by column, whatever its row number."""
    columns = sorted((name, dtype) for name, dtype in rows.schema.items() if name != "row")
    content = [
        pl.col(name).list.join("\x1f") if isinstance(dtype, pl.List) else pl.col(name) for name, dtype in columns
    ]
    return rows.select(pl.lit("\x1f".join(name for name, _ in columns)).alias(""), *content).hash_rows(seed=36)


def progress_file(folder: Path, kind: str, name: str, options: object) -> Path:
    """Return the progress file for an import of this source with these options."""
    key = hashlib.sha256(json.dumps([kind, name, repr(options)]).encode()).hexdigest()[:16]
    return folder / f"{kind}-{key}.json"


def _read_progress(path: Path) -> Progress:
    """Return the recorded progress; none if it cannot be read, since an import may start from the beginning."""
    try:
        read = Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return Progress()
    return read if isinstance(read.num_rows, int) and isinstance(read.digest, int) else Progress()
