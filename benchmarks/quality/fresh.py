"""The student mixed with sources whose counts follow events: each user's events up to the validation label count, too.

The models and the weights of the mix stay. This is what a nightly refresh of the sources serves without training.
"""

import shutil
from pathlib import Path

import polars as pl

from models.catalogue import load_catalogue
from models.mixer import STUDENT
from models.student import read_student
from pipelines.data.examples import Split
from pipelines.scoring.metrics import Scorer
from pipelines.scoring.mixed import MixedScorer, probabilities_of, read_mixer
from pipelines.scoring.student import StudentScorer
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


def fresh_scorer(tokenized: Path, students: Path, fresh: Path) -> Scorer:
    """Return the served student's scorer over the fresh sources; unmixed if its mix has no source."""
    mixer = read_mixer(fresh, len(load_catalogue(tokenized / "catalogue.parquet").item_ids))
    student = StudentScorer(read_student(students / "student.safetensors"))
    return MixedScorer(mixer, STUDENT, probabilities_of(student)) if mixer.blends[STUDENT] else student
