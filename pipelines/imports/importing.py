"""One import: the rows of a source are checked and delivered in batches, and how far it is, is written down after each. A killed one goes on where it was.

    <folder>/<name>.json    rows that are delivered, and a hash of them

An import begins by reading as many rows again as were delivered. Where they are the same, as of a source that only grew, it goes on behind them; where the source
is another by now, it begins anew, which does no harm: a delivery replaces an item by the same, and an event that was delivered before counts once.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Generic, TypeVar

from models.files import rename_durably
from pipelines.imports.sources import Row
from services.errors import DataError, InvalidRequest

BATCH_ROWS = 1_000
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that cannot be used: its number from 1, without a file's header; its column; what is wrong with it and what would be right."""

    row: int
    column: str
    why: str

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an import is, and the hash of the rows up to there."""

    num_rows: int = 0
    num_refused: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an import did: rows of the source, those of them that were delivered before, those refused in all, and whether it began anew because the source changed."""

    num_rows: int
    num_before: int
    num_refused: int
    is_again: bool


class Import(Generic[Read]):
    """Delivers the rows of a source that are not delivered yet.

    Args:
        open_rows: Begins the source from its first row.
        read: Turns a row into what is delivered. Raises InvalidRequest naming the column.
        deliver: Returns once a batch is kept for good. Raises DependencyUnavailable.
        refuse: Is told of each row that cannot be used.
        moved: Is told after each batch how many rows were read.
        progress_file: Where it is written how far the import is.
    """

    def __init__(
        self,
        open_rows: Callable[[], Iterator[Row]],
        read: Callable[[Row], Read],
        deliver: Callable[[Sequence[Read]], None],
        refuse: Callable[[Refused], None],
        moved: Callable[[int], None],
        progress_file: Path,
    ) -> None:
        self._open_rows = open_rows
        self._read = read
        self._deliver = deliver
        self._refuse = refuse
        self._moved = moved
        self._file = progress_file

    def run(self) -> Outcome:
        """Deliver what is left. Raises DataError where no row can be used, and what source and delivery raise."""
        before = _read_progress(self._file)
        batches = _batches(self._open_rows())
        skipped = Progress()
        while skipped.num_rows < before.num_rows and (batch := next(batches, None)) is not None:
            whole, rest = batch[: before.num_rows - skipped.num_rows], batch[before.num_rows - skipped.num_rows :]
            skipped = _behind(skipped, whole, 0)
            if rest:  # the source grew behind what was its end
                batches = chain([rest], batches)
                break
        is_again = skipped.digest != before.digest
        done = Progress() if is_again else before
        if is_again:
            batches = _batches(self._open_rows())
        begun_at = done.num_rows
        for batch in batches:
            done = self._one(batch, done)
            _write_progress(self._file, done)
            self._moved(done.num_rows)
        if not done.num_rows:
            raise DataError("", "the source has no rows", "a row for each item or event")
        return Outcome(num_rows=done.num_rows, num_before=begun_at, num_refused=done.num_refused, is_again=is_again)

    def _one(self, batch: Sequence[Row], done: Progress) -> Progress:
        """Deliver a batch, and return how far the import then is. Refuses a first batch without a usable row: the table is then another than was meant."""
        good, refused = [], []
        for number, row in enumerate(batch, done.num_rows + 1):
            try:
                good.append(self._read(row))
            except InvalidRequest as error:
                refused.append(Refused(number, error.field, f"{error.problem}; {error.fix}"))
        if not good and not done.num_rows:
            raise DataError(
                refused[0].column, f"not one row can be used, such as {refused[0]}", "the fix that it names"
            )
        for one in refused:
            self._refuse(one)
        self._deliver(good)
        return _behind(done, batch, len(refused))


def progress_file(folder: Path, kind: str, name: str, options: object) -> Path:
    """Return where the progress of an import of this source with these options is kept."""
    key = hashlib.sha256(json.dumps([kind, name, repr(options)]).encode()).hexdigest()[:16]
    return folder / f"{kind}-{key}.json"


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(islice(rows, BATCH_ROWS)):
        yield batch


def _behind(progress: Progress, batch: Sequence[Row], num_refused: int) -> Progress:
    """Return the progress behind more rows: each row's hash continues that of the rows before it, however they are cut into batches."""
    digest = progress.digest
    for row in batch:
        content = json.dumps(row, sort_keys=True, default=str, ensure_ascii=False)
        digest = hashlib.sha256(f"{digest}{content}".encode(errors="surrogatepass")).hexdigest()
    return Progress(
        num_rows=progress.num_rows + len(batch), num_refused=progress.num_refused + num_refused, digest=digest
    )


def _read_progress(path: Path) -> Progress:
    """Return what was written down; nothing where that cannot be read, since an import may begin anew."""
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return Progress()


def _write_progress(path: Path, progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(asdict(progress)))
    rename_durably(scratch, path)
