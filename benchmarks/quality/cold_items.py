"""Cold items: how often a model finds an item that no training event named, beside what knows items by popularity or by text alone.

    python -m benchmarks.quality cold-items --sequences FOLDER --state FOLDER --json OUT [--epochs N]

The folder is one as benchmarks/quality/sequences.py describes it. One of twenty items is
removed from all training sequences. An item is one token, so training does not know these items at all, and both models get them as `tailrace
add-items` appends them, from their texts. A case is each held-out item's event with at least one event of another kind
before it; the item is ranked among ALL items that its user has not seen. `nearest_text` ranks items by the cosine of their text with that of the
newest item, `nearest_embedding` by the whole embedding that a new item gets its codes from. recall@10 over all items (`all`), and among the held-out items
alone (`among_cold`), with 95 % bootstrap intervals; `gains` are differences on the same cases. A lift is the factor on the rows of new items that `tailrace add-items` takes as well;
`ordinary` is what it costs: NDCG@10 of the validation labels, all trained items, with the new items in the catalogue, and `before` without them.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from rich.console import Console

from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from benchmarks.quality.sequences import read_items, read_sequences
from benchmarks.quality.trained_pair import cpu_s_of, fit_pair
from models.baselines import Popularity
from models.catalogue import Catalogue, load_catalogue
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from models.student import StudentModel, read_student
from pipelines.codes.embedding import ItemEncoder, fit_encoder, save_texts, texts_of
from pipelines.codes.options import CodesOptions
from pipelines.data.examples import DISLIKES, SPLIT, Cases, Split, SplitKind, read_cases, sample_cases
from pipelines.publication.add_items import with_items, with_text_rows
from pipelines.scoring.dense import DecoderScorer
from pipelines.scoring.metrics import Scorer, gains, interval, rank_labels
from pipelines.scoring.student import StudentScorer
from pipelines.training.recipes import choose, data_size, read_recipes
from pipelines.training.start.text_rows import load_item_text

_AT = 10
_CASES_PER_BATCH = 64
_LIFTS = (1.0, 1.2, 1.4)
_COLD_SHARE, _MOST_CASES = 0.05, 5_000
_OVER = "nearest_text"


def main() -> None:
    """Train on what is left, rank the held-out items, and write the file."""
    options = _options()
    torch.set_num_threads(1)
    data = read_data(options.sequences)
    tokenized, folder = options.state / "tokens", options.state / "pair"
    tokenized.mkdir(parents=True, exist_ok=True)
    encoder = save_tokenized(data.without_cold(), CodesOptions(depth=1), tokenized)
    recipes = read_recipes(epochs=options.epochs, student_epochs=options.epochs)
    fit_pair(tokenized, choose(recipes, data_size(tokenized)), folder, Console(stderr=True))
    trained = Models(
        load_decoder(folder / "decoder", torch.float32, "cpu"), read_student(folder / "student.safetensors")
    )
    before = load_catalogue(tokenized / "catalogue.parquet")
    warm = np.setdiff1d(np.arange(len(data.items)), data.cold)
    report = _Report(data, warm, sample_cases(read_cases(tokenized, Split.VALID), _MOST_CASES))
    for name, scorer in make_baselines(data, encoder):
        report.add(name, scorer)
    for name, scorer in make_scorers(trained, before):
        report.add_before(name, scorer)
    for lift in _LIFTS:
        catalogue, models = appended(data, before, trained, folder, lift)
        for name, scorer in make_scorers(models, catalogue):
            report.add(name, scorer, lift)
    spent_s = {"training_cpu_s": sum(cpu_s_of(folder).values())}
    write_report(options.json, about_run("quality cold-items") | report.as_dict() | spent_s)


class Data:
    """Items in index order, the sequences without held-out items, and the cases: history and held-out item."""

    def __init__(
        self, items: pl.DataFrame, train: list[np.ndarray], cases: list[tuple[np.ndarray, int]], cold: np.ndarray
    ) -> None:
        self.items, self.train, self.cases, self.cold = items, train, cases, cold

    def without_cold(self) -> "Data":
        """Return items and sequences as if the held-out items did not exist, and no case."""
        is_warm = ~np.isin(np.arange(len(self.items)), self.cold)
        index = np.cumsum(is_warm) - 1
        none = np.zeros(0, dtype=np.int64)
        return Data(self.items.filter(is_warm), [index[sequence] for sequence in self.train], [], none)


def read_data(folder: Path) -> Data:
    """Read a folder of sequences and hold some of its items out."""
    items = read_items(folder).sort("item_id")
    index = {item_id: number for number, item_id in enumerate(items["item_id"])}
    sequences = [np.array([index[item] for item in sequence]) for _, sequence in read_sequences(folder)]
    is_cold = np.random.default_rng(0).random(len(items)) < _COLD_SHARE
    train, cases = [], []
    for sequence in sequences:
        warm = ~is_cold[sequence]
        train.append(sequence[warm])
        cases += [(sequence[:place][warm[:place]], int(sequence[place])) for place in np.flatnonzero(~warm)]
    return Data(items, train, [case for case in cases if len(case[0])], np.flatnonzero(is_cold))


@dataclass(frozen=True, slots=True)
class Models:
    """What was trained."""

    decoder: Decoder
    student: StudentModel


def save_tokenized(data: Data, options: CodesOptions, out: Path) -> ItemEncoder:
    """Write catalogue, code book, texts and examples as the stage does, and return the encoder. Of each sequence the last event validates."""
    num_items = len(data.items)
    train = [sequence[:-1] for sequence in data.train if len(sequence) > 2]
    valid = [(sequence[:-1], int(sequence[-1])) for sequence in data.train if len(sequence) > 2]
    texts = texts_of(data.items)
    save_texts(texts, out)
    encoder, _ = fit_encoder(texts, train, options.embedding_size, options.seed)
    Catalogue(
        item_ids=tuple(data.items["item_id"]),
        titles=tuple(data.items["title"]),
        categories=tuple(tuple(names) for names in data.items["categories"].to_list()),
        codes=np.arange(num_items, dtype=np.int32).reshape(-1, 1),
        level_sizes=(num_items,),
        popularity=np.bincount(np.concatenate(train), minlength=num_items).astype(np.float64),
    ).save(out / "catalogue.parquet")
    rows: list[tuple[str, list[int], int | None]] = [(Split.TRAIN.value, sequence.tolist(), None) for sequence in train]
    rows += [(Split.VALID.value, history.tolist(), target) for history, target in valid]
    pl.DataFrame(
        {
            "user_id": [str(number) for number in range(len(rows))],
            "split": [row[0] for row in rows],
            "history": [row[1] for row in rows],
            "target": pl.Series([row[2] for row in rows], dtype=pl.Int32),
            "idle_s": pl.Series([None] * len(rows), dtype=pl.Float64),
            **{name: pl.Series([None] * len(rows), dtype=pl.List(pl.Float32)) for name in ("weights", "counts")},
            "dislikes": pl.Series([None] * len(rows), dtype=DISLIKES),
        }
    ).write_parquet(out / "examples.parquet")
    (out / SPLIT).write_text(json.dumps({"kind": SplitKind.LEAVE_ONE_OUT, "repeats": False}))
    return encoder


def appended(data: Data, known: Catalogue, trained: Models, folder: Path, lift: float) -> tuple[Catalogue, Models]:
    """Return catalogue and models with the held-out items."""
    text = load_item_text(folder)
    assert text is not None, "the recipe learns from text"
    new = data.items.filter(~pl.col("item_id").is_in(list(known.item_ids)))
    catalogue = with_items(known, new, None)
    rows = lift * text.rows(texts_of(new))
    student, decoder = with_text_rows(trained.student, trained.decoder, known, catalogue, rows)
    return catalogue, Models(decoder, student)


def make_baselines(data: Data, encoder: ItemEncoder) -> Sequence[tuple[str, Scorer]]:
    """Return them by name."""
    texts = texts_of(data.items)
    embeddings = encoder.encode(texts)
    return (
        ("popularity", Popularity([sequence for sequence in data.train if len(sequence)], len(texts))),
        ("nearest_text", _nearest(embeddings[:, : encoder.text.text_WT.shape[1]])),
        ("nearest_embedding", _nearest(embeddings)),
    )


def make_scorers(trained: Models, catalogue: Catalogue) -> Sequence[tuple[str, Scorer]]:
    """Return the models by name."""
    return (
        ("student", StudentScorer(trained.student)),
        ("decoder", DecoderScorer(trained.decoder, catalogue, 200, 50)),
    )


def _nearest(rows: np.ndarray) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    def score(histories: Sequence[np.ndarray]) -> np.ndarray:
        scores: np.ndarray = rows[[history[-1] for history in histories]] @ rows.T
        return scores

    return score


def recall_hits(scorer: Scorer, data: Data) -> dict[str, np.ndarray]:
    """Return for each case whether the held-out item is among the ten best unseen items: of all, and of the held-out ones."""
    cases = data.cases[:: max(1, -(-len(data.cases) // _MOST_CASES))]
    found: dict[str, list[float]] = {"all": [], "among_cold": []}
    for start in range(0, len(cases), _CASES_PER_BATCH):
        batch = cases[start : start + _CASES_PER_BATCH]
        for (history, target), row in zip(batch, scorer([history for history, _ in batch]), strict=True):
            scores = row.astype(np.float64)
            scores[history] = -np.inf
            found["all"].append(_is_hit(scores, scores[target]))
            found["among_cold"].append(_is_hit(scores[data.cold], scores[target]))
    return {name: np.array(values) for name, values in found.items()}


def _is_hit(scores: np.ndarray, own: float) -> float:
    """Return the chance that ties, broken at random, leave the item among the ten best. An item that no beam found is missed."""
    if own == -np.inf:
        return 0.0
    above, tied = int((scores > own).sum()), int((scores == own).sum())
    return float(np.clip((_AT - above) / tied, 0, 1))


class _Report:
    """Collects what each model found of the held-out items, and with these in the catalogue of all others."""

    def __init__(self, data: Data, trained: np.ndarray, ordinary: Cases) -> None:
        self._data, self._trained, self._ordinary = data, trained, ordinary
        self._hits: dict[tuple[str, float | None], dict[str, np.ndarray]] = {}
        self._before: dict[str, np.ndarray] = {}
        self._costs: list[dict[str, Any]] = []

    def add_before(self, name: str, scorer: Scorer) -> None:
        """Rank the cases of trained items with a model that has no new ones."""
        self._before[name] = gains(rank_labels(scorer, self._ordinary).masked, _AT)

    def add(self, name: str, scorer: Scorer, lift: float | None = None) -> None:
        """Rank the cases with a model; one with a `lift` also those of trained items, among all."""
        self._hits[name, lift] = recall_hits(scorer, self._data)
        if lift is not None:
            histories = tuple(self._trained[history] for history in self._ordinary.histories)
            cases = replace(self._ordinary, histories=histories, targets=self._trained[self._ordinary.targets])
            now, before = gains(rank_labels(scorer, cases).masked, _AT), self._before[name]
            cost = {"ndcg10": float(now.mean()), "before": float(before.mean()), "ci95": interval(now - before, seed=0)}
            self._costs.append({"model": name, "lift": lift} | cost)

    def as_dict(self) -> dict[str, Any]:
        """Return recalls with intervals, the models' gains over the nearest text, and what trained items lose."""
        rows, gained = [], []
        for (name, lift), found in self._hits.items():
            for scope, values in found.items():
                about = {"model": name, "lift": lift, "scope": scope}
                rows.append(about | {"recall10": float(values.mean()), "ci95": interval(values, seed=0)})
                if lift is not None:
                    more = values - self._hits[_OVER, None][scope]
                    gained.append(about | {"over": _OVER, "gain": float(more.mean()), "ci95": interval(more, seed=0)})
        return {
            "num_items": len(self._data.items),
            "num_cold_items": len(self._data.cold),
            "num_cases": len(next(iter(self._hits.values()))["all"]),
            "num_ordinary_cases": len(self._ordinary),
            "rows": rows,
            "gains": gained,
            "ordinary": self._costs,
        }


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--sequences", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--state", type=Path, required=True, metavar="FOLDER", help="folder of what was trained")
    parser.add_argument("--epochs", type=at_least_one, help="epochs of decoder and student, instead of the recipe's")
    return parser.parse_args()
