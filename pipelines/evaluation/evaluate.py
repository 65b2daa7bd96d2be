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
from models.prompt import Prompt
from models.search import OWN_SEARCH, Search
from models.student import StudentConfig, read_student
from pipelines.data.examples import Cases, Split, read_cases, read_sequences, read_split, sample_cases
from pipelines.data.options import SplitKind
from pipelines.evaluation.decoder_times import decoder_ms
from pipelines.evaluation.gain import MIN_CASES, gain_by_slice, served_as, shelf_of, slices_of, with_cost
from pipelines.evaluation.gate import student_share
from pipelines.evaluation.held_out import MOST_USERS, HeldOut
from pipelines.evaluation.variety import ListedScorer
from pipelines.foreign.model import ImportedModel
from pipelines.foreign.stage import judged_labels
from pipelines.runner.stage import Progress
from pipelines.scoring.beams import BeamScorer, decoder_scorer
from pipelines.scoring.dense import DecoderScorer
from pipelines.scoring.metrics import Ranks, Scorer, gains, rank_labels, summarise
from pipelines.scoring.mixed import MixedScorer, SourceScorer, probabilities_of, read_about, read_mixer
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
    imported: ImportedModel | None = None
    """The import of the decoder; None for our own."""

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.max_items, self.stride) if self.imported is None else self.imported.prompt

    @property
    def search(self) -> Search:
        return OWN_SEARCH if self.imported is None else self.imported.search

    def judged(self, cases: Cases) -> np.ndarray:
        """Return on which cases the decoder is judged: all, or those that an imported decoder cannot have seen."""
        if self.imported is None:
            return np.ones(len(cases), dtype=bool)
        return judged_labels(self.imported, cases.label_us, len(cases))


def evaluate(
    trained: EvaluatedModels, held_out: HeldOut, dataset: str, out: Path, progress: Progress, sources: Path
) -> None:
    """Rank every test label with every model and mix; write report.json and ranks.parquet.

    `sources` is the folder of the untrained sources (pipelines.similarity.sources).
    """
    catalogue, cases = (
        load_catalogue(trained.tokenized / "catalogue.parquet"),
        held_out.open("evaluation of new models"),
    )
    scorers, shelves = list(_scorers(trained, catalogue, sources)), shelf_of(catalogue.popularity)
    ranks: dict[str, Ranks] = {}
    metrics: dict[str, dict[str, Any]] = {}
    for done, (name, scorer) in enumerate(scorers, start=1):
        listed = ListedScorer(scorer, shelves, repeats=trained.repeats)
        with kept_memory():
            ranks[name] = rank_labels(listed, cases)
        metrics[name] = summarise(ranks[name], repeats=trained.repeats) | listed.summary()
        progress(done, len(scorers) + 1, name)
    served = {name: label_ranks.as_served(repeats=trained.repeats) for name, label_ranks in ranks.items()}
    decoder = read_config(trained.decoder_dir)
    student = read_student(trained.students_dir / "student.safetensors").config
    split, slices = read_split(trained.tokenized), slices_of(cases, catalogue.popularity)
    cost_ms = decoder_ms(
        trained.decoder_dir,
        catalogue,
        cases.histories,
        slices,
        prompt=trained.prompt,
        repeats=trained.repeats,
        search=trained.search,
    )
    is_judged = trained.judged(cases)
    if trained.imported is not None:
        metrics["decoder"] |= _about_labels(trained.imported, served, is_judged)
    by_name = dict(scorers)
    decoder_name, student_name = (served_as(name, by_name) for name in ("decoder", "student"))
    gain = _judged_gain(gains(served[decoder_name], 10), gains(served[student_name], 10), slices, is_judged)
    validated = _validated_gain(trained, catalogue, by_name[decoder_name], by_name[student_name])
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
        "mixer": read_about(sources),
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
    trained: EvaluatedModels, catalogue: Catalogue, decoder_scorer: Scorer, student_scorer: Scorer
) -> list[dict[str, Any]]:
    """Return the decoder's gain over its student by slice on the validation labels, of as many users as are tested."""
    cases = sample_cases(read_cases(trained.tokenized, Split.VALID), MOST_USERS)
    is_judged = trained.judged(cases)
    if not is_judged.all() and is_judged.sum() < MIN_CASES:
        return []
    with kept_memory():
        decoder, student = (
            gains(rank_labels(scorer, cases).as_served(repeats=trained.repeats), 10)
            for scorer in (decoder_scorer, student_scorer)
        )
    return _judged_gain(decoder, student, slices_of(cases, catalogue.popularity), is_judged)


def _judged_gain(
    decoder: np.ndarray, student: np.ndarray, slices: Mapping[str, np.ndarray], is_judged: np.ndarray
) -> list[dict[str, Any]]:
    """Return the gain by slice on the judged labels; with too few of them, on all labels, which then do not count."""
    if is_judged.all() or is_judged.sum() < MIN_CASES:
        return gain_by_slice(decoder, student, slices)
    judged = {name: members[is_judged] for name, members in slices.items()}
    kept = {name: members for name, members in judged.items() if members.any()}
    return gain_by_slice(decoder[is_judged], student[is_judged], kept)


def _about_labels(imported: ImportedModel, ranks: Mapping[str, np.ndarray], is_judged: np.ndarray) -> dict[str, Any]:
    """Return what the decoder's metrics may count for: labels that it cannot have seen, and the baselines on them."""
    num_judged = int(is_judged.sum())
    about: dict[str, Any] = {"may_have_seen_labels": num_judged < MIN_CASES, "num_judged": num_judged}
    if num_judged < MIN_CASES:
        return about
    judged = {name: float(gains(label_ranks[is_judged], 10).mean()) for name, label_ranks in ranks.items()}
    return about | {"seen_until": str(imported.seen_until), "judged_ndcg@10": judged}


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


def model_probabilities(trained: EvaluatedModels) -> dict[str, Scorer]:
    """Return scorers of the probabilities that both models give to items."""
    decoder, student = _models(trained, load_catalogue(trained.tokenized / "catalogue.parquet"))
    return {
        "student": probabilities_of(student),
        "decoder": probabilities_of(decoder, are_logs=isinstance(decoder, BeamScorer)),
    }


def served_student(trained: EvaluatedModels, sources: Path) -> Scorer:
    """Return the scorer of the student as it serves: its probabilities, mixed with its sources if it has any."""
    catalogue = load_catalogue(trained.tokenized / "catalogue.parquet")
    student = StudentScorer(read_student(trained.students_dir / "student.safetensors").to(trained.device))
    mixer, probabilities = read_mixer(sources, catalogue), probabilities_of(student)
    return MixedScorer(mixer, "student", probabilities) if mixer.blends["student"] else probabilities


def _models(trained: EvaluatedModels, catalogue: Catalogue) -> tuple[DecoderScorer | BeamScorer, StudentScorer]:
    decoder = load_decoder(trained.decoder_dir, torch.float32, trained.device)
    student = read_student(trained.students_dir / "student.safetensors").to(trained.device)
    return decoder_scorer(decoder, catalogue, trained.prompt, trained.search), StudentScorer(student)


def _scorers(trained: EvaluatedModels, catalogue: Catalogue, sources: Path) -> Iterator[tuple[str, Scorer]]:
    sequences, num_items = read_sequences(trained.tokenized), len(catalogue.item_ids)
    yield "popularity", Popularity(sequences, num_items)
    yield "bigram", Bigram(sequences, num_items)
    yield "item_knn", ItemKnn(sequences, num_items)
    mixer, about = read_mixer(sources, catalogue), read_about(sources)
    yield "transitions", SourceScorer(mixer, {"transitions": 1.0}, num_items)
    yield "unlearned", SourceScorer(mixer, about["unlearned"], num_items)
    yield "twin", StudentScorer(read_student(trained.students_dir / "twin.safetensors").to(trained.device))
    decoder, student = _models(trained, catalogue)
    yield "student", student
    yield "decoder", decoder
    models = {
        "student": probabilities_of(student),
        "decoder": probabilities_of(decoder, are_logs=isinstance(decoder, BeamScorer)),
    }
    for name, scorer in models.items():
        if mixer.blends[name]:
            yield f"mixed_{name}", MixedScorer(mixer, name, scorer)
