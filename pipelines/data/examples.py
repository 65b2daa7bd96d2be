"""The examples of the split as the later stages see them: sequences to learn, and labelled cases to be judged on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from pipelines.data.split import Split


@dataclass(frozen=True, slots=True)
class Cases:
    """Labelled histories of one split, aligned: user ids, item indices oldest first, and the index of what came next."""

    user_ids: tuple[str, ...]
    histories: tuple[np.ndarray, ...]
    targets: np.ndarray

    def __len__(self) -> int:
        """How many."""
        return len(self.user_ids)


def read_sequences(tokenized: Path) -> list[np.ndarray]:
    """Read the sequences to train on; those too short to hold a next item are left out."""
    rows = _read(tokenized, Split.TRAIN)
    return [np.array(history, dtype=np.int64) for history in rows["history"].to_list() if len(history) > 1]


def read_cases(tokenized: Path, split: Split) -> Cases:
    """Read the cases of the validation or the test split."""
    rows = _read(tokenized, split)
    histories = tuple(np.array(history, dtype=np.int64) for history in rows["history"].to_list())
    return Cases(tuple(rows["user_id"]), histories, rows["target"].to_numpy().astype(np.int64))


def _read(tokenized: Path, split: Split) -> pl.DataFrame:
    return pl.read_parquet(tokenized / "examples.parquet").filter(pl.col("split") == split)
