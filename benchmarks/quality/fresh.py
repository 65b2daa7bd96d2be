"""The student mixed with sources whose counts follow events: each user's events up to the validation label count, too.

The models and the weights of the mix stay. This is what a nightly refresh of the sources serves without training.
"""

import shutil
from pathlib import Path

import polars as pl

from pipelines.data.examples import Split
from pipelines.similarity.sources import make_serving

FRESH = "fresh_student"


def count_fresh(tokenized: Path, students: Path, sources: Path, out: Path) -> None:
    """Write the sources of the stage `sources` into this folder, counted with the validation events."""
    followed = out / "tokenized"
    followed.mkdir()
    for path in tokenized.iterdir():
        if path.is_file():
            shutil.copyfile(path, followed / path.name)
    examples = pl.read_parquet(tokenized / "examples.parquet")
    is_valid, is_train = (pl.col("split") == split for split in (Split.VALID, Split.TRAIN))
    seen = examples.filter(is_valid).with_columns(
        history=pl.concat_list("history", "target"),
        split=pl.lit(Split.TRAIN.value),
        counts=pl.lit(None, examples.schema["counts"]),
    )
    rest = examples.filter(is_train & ~pl.col("user_id").is_in(seen["user_id"].to_list()))
    pl.concat([seen, rest]).write_parquet(followed / "examples.parquet")
    make_serving(sources, followed, students, out)
