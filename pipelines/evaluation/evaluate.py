"""Stage 6: evaluates decoder, student and baselines under one protocol.

    report.json      metrics by model, and the decoder's gain over its student by slice, with its cost
    ranks.parquet    by model, the rank of each test case's label as served
    slices.parquet   by slice, whether each test case belongs to it

The label of the test split (pipelines.data.examples) is ranked among ALL items, masked (items of the history removed)
and unmasked; if users repeat items, the main metrics are unmasked. Baselines learn from the same training sequences as
the models. The variety of the lists is measured too (variety.py).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from models.baselines import Bigram, ItemKnn, Popularity
from models.catalogue import Catalogue, load_catalogue
from models.decoder.config import read_config
from models.decoder.weights import load_decoder
from models.student import StudentConfig, read_student
from pipelines.data.examples import Split, read_cases, read_sequences, read_split, sample_cases
from pipelines.data.options import SplitKind
from pipelines.evaluation.decoder_times import decoder_ms
from pipelines.evaluation.gain import gain_by_slice, shelf_of, slices_of, with_cost
from pipelines.evaluation.gate import student_share
from pipelines.evaluation.held_out import MOST_USERS, HeldOut
from pipelines.evaluation.variety import ListedScorer
from pipelines.runner.stage import Progress
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.metrics import Ranks, Scorer, gains, rank_labels, summarise
from pipelines.scoring.student import StudentScorer
from pipelines.training.fit.memory import kept_memory
from pipelines.training.speed import decoder_work

REPORT = "report.json"
_RANKS, _SLICES = "ranks.parquet", "slices.parquet"
_PROTOCOL = "{split}, all items ranked, test split, mean rank on ties; ndcg@10_interval: 95 % bootstrap"
_SPLITS = {
    SplitKind.LEAVE_ONE_OUT: "leave one out by time",
    SplitKind.GLOBAL_TIME: "one cut in time for all users, models trained on earlier events",
}


@dataclass(frozen=True, slots=True)
class EvaluatedModels:
    """The folders of the evaluated models, and the prompt's shape."""

    tokenized: Path
    decoder_dir: Path
    students_dir: Path
    max_items: int
    stride: int
    repeats: bool = False
    """Whether the data has repeats: seen items then compete in the main metrics."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def evaluate(trained: EvaluatedModels, held_out: HeldOut, dataset: str, out: Path, progress: Progress) -> None:
    """Rank every test label with every model; write report.json and ranks.parquet."""
    catalogue, cases = (
        load_catalogue(trained.tokenized / "catalogue.parquet"),
        held_out.open("evaluation of new models"),
    )
    scorers, shelves = list(_scorers(trained, catalogue)), shelf_of(catalogue.popularity)
    ranks: dict[str, Ranks] = {}
    metrics: dict[str, dict[str, Any]] = {}
    for done, (name, scorer) in enumerate(scorers, start=1):
        listed = ListedScorer(scorer, shelves, repeats=trained.repeats)
        with kept_memory():
            ranks[name] = rank_labels(listed, cases)
        metrics[name] = summarise(ranks[name], repeats=trained.repeats) | listed.summary()
        progress(done, len(scorers) + 1, name)
    served = {name: found.as_served(repeats=trained.repeats) for name, found in ranks.items()}
    decoder = read_config(trained.decoder_dir)
    student = read_student(trained.students_dir / "student.safetensors").config
    split, slices = read_split(trained.tokenized), slices_of(cases, catalogue.popularity)
    prompt = {"max_items": trained.max_items, "stride": trained.stride}
    cost_ms = decoder_ms(trained.decoder_dir, catalogue, cases.histories, slices, repeats=trained.repeats, **prompt)
    gain = gain_by_slice(gains(served["decoder"], 10), gains(served["student"], 10), slices)
    validated = _validated_gain(trained, catalogue, dict(scorers))
    progress(len(scorers) + 1, len(scorers) + 1, "decoder and student on validation labels")
    report = {
        "dataset": dataset,
        "protocol": _PROTOCOL.format(split=_SPLITS[SplitKind(split["kind"])]),
        "split": split,
        "repeats": trained.repeats,
        "num_test_users": len(cases),
        "num_items": len(catalogue.item_ids),
        "metrics": metrics,
        "student_share": student_share(metrics),
        "gain": with_cost(gain, validated, cost_ms),
        "multiply_adds": {
            "decoder": decoder_work(decoder, trained.max_items),
            "student": student_work(student, trained.max_items),
        },
    }
    pl.DataFrame(served).write_parquet(out / _RANKS)
    pl.DataFrame(slices).write_parquet(out / _SLICES)
    (out / REPORT).write_text(json.dumps(report, indent=1))


def _validated_gain(
    trained: EvaluatedModels, catalogue: Catalogue, scorers: Mapping[str, Scorer]
) -> list[dict[str, Any]]:
    """Return the decoder's gain over its student by slice on the validation labels, of as many users as are tested."""
    cases = sample_cases(read_cases(trained.tokenized, Split.VALID), MOST_USERS)
    with kept_memory():
        decoder, student = (
            gains(rank_labels(scorers[name], cases).as_served(repeats=trained.repeats), 10)
            for name in ("decoder", "student")
        )
    return gain_by_slice(decoder, student, slices_of(cases, catalogue.popularity))


def read_ranks(evaluated: Path) -> dict[str, np.ndarray]:
    """Return, by model, the rank of each test case's label as served."""
    return {ranks.name: ranks.to_numpy() for ranks in pl.read_parquet(evaluated / _RANKS)}


def read_slices(evaluated: Path) -> dict[str, np.ndarray]:
    """Return, by slice, which test cases belong to it, in the same order."""
    return {members.name: members.to_numpy() for members in pl.read_parquet(evaluated / _SLICES)}


def read_report(folder: Path) -> dict[str, Any]:
    """Read the report of an evaluation or of a bundle."""
    report: dict[str, Any] = json.loads((folder / REPORT).read_text())
    return report


def student_work(config: StudentConfig, num_places: int) -> int:
    """Return the multiply-adds of one history as served (pipelines/student_graph), embeddings and output head apart."""
    per_hop = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.feed_forward
    attention = 2 * num_places * config.num_heads * config.hidden_size
    return config.num_hops * (per_hop + attention)


def _scorers(trained: EvaluatedModels, catalogue: Catalogue) -> Iterator[tuple[str, Scorer]]:
    sequences, num_items = read_sequences(trained.tokenized), len(catalogue.item_ids)
    yield "popularity", Popularity(sequences, num_items)
    yield "bigram", Bigram(sequences, num_items)
    yield "item_knn", ItemKnn(sequences, num_items)
    for name in ("twin", "student"):
        yield name, StudentScorer(read_student(trained.students_dir / f"{name}.safetensors").to(trained.device))
    decoder = load_decoder(trained.decoder_dir, torch.float32, trained.device)
    yield "decoder", decoder_scorer(decoder, catalogue, trained.max_items, trained.stride)
