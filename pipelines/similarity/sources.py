"""The untrained sources of scores: tables of related items, and their weights for each model.

    <name>/        a table (models/similar.py) of `similar`, `transitions` and, if items have texts, `text`
    similar.json   the mix of similar items (mix.py)
    mixer.json     {mixer: as a manifest keeps it, unlearned: weights of the sources without any model, earned: ...}

Validation chooses the weights for the judged pair. The tables of the serving pair are counted from all events and keep
these weights.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.catalogue import load_catalogue
from models.mixer import DECODER, MODEL, Mixer, Source, blend_of
from models.similar import NONE, SIMILAR, SimilarTable, num_neighbours
from pipelines.codes.embedding import fit_text, read_texts
from pipelines.data.examples import Cases, Split, cases_where, read_cases, read_counts, read_sequences, sample_cases
from pipelines.evaluation.gain import HISTORIES, MIN_CASES
from pipelines.runner.stage import Progress, silent
from pipelines.scoring.metrics import Scorer, interval
from pipelines.scoring.mixed import ABOUT
from pipelines.similarity import mix
from pipelines.similarity.blending import Candidates, Chosen, candidates_of, choose, choose_in_slice
from pipelines.similarity.co_visits import Neighbours, count_transitions
from pipelines.similarity.new_items import choose_new_items
from pipelines.similarity.vectors import nearest

TRANSITIONS, TEXT = "transitions", "text"
_NUM_CASES = 30_000
_READINGS = ((5, 0.5), (10, 0.85))
"""Newest items that a source is read at, and the decay for each step back. The first is the default."""
TEXT_SIZE = 256


def make_sources(
    tokenized: Path,
    students_dir: Path,
    models: Mapping[str, Scorer],
    out: Path,
    progress: Progress,
    *,
    repeats: bool,
    judged: Callable[[Cases], np.ndarray] | None = None,
) -> None:
    """Write the tables of the judged pair and choose the weights; with too few validation cases, models stay unmixed.

    `models` score probabilities, by the model's name. `judged` returns which cases an imported decoder cannot have
    seen: only these choose the decoder's weights.
    """
    related = mix.read_sources(tokenized, students_dir, progress)
    mixed = mix.choose_mix(related, tokenized, repeats=repeats)
    tables = _save_tables(tokenized, related, mixed, out, progress)
    cases = sample_cases(read_cases(tokenized, Split.VALID), _NUM_CASES)
    is_enough = len(cases) >= MIN_CASES
    sources = {name: _read_best(table, cases, repeats=repeats) for name, table in tables.items()}
    names = tuple(sources)
    unlearned = Chosen(weights={TRANSITIONS: 1.0})
    blends: dict[str, list[dict[str, Any]]] = {}
    new_items: dict[str, dict[str, float]] = {}
    is_new_V = load_catalogue(tokenized / "catalogue.parquet").popularity == 0
    earned: dict[str, list[Any]] = {}
    for model, scorer in models.items():
        is_judged_N = np.ones(len(cases), bool) if judged is None or model != DECODER else judged(cases)
        if is_judged_N.sum() < MIN_CASES:
            blends[model], earned[model] = [], []
            continue
        candidates = candidates_of(cases, scorer, sources, repeats=repeats).of(is_judged_N)
        chosen = choose(candidates, names, has_model=True)
        blends[model] = _blends(candidates, names, chosen)
        earned[model] = list(chosen.earned)
        mixer = Mixer(sources, {model: [blend_of(row) for row in blends[model]]})
        if chosen_sources := choose_new_items(
            cases_where(cases, is_judged_N), scorer, mixer, model, is_new_V, repeats=repeats
        ):
            new_items[model] = chosen_sources
    if is_enough:
        unlearned = choose(candidates_of(cases, None, sources, repeats=repeats), names, has_model=False)
    about = {
        "mixer": {
            "sources": {name: {"newest": source.newest, "decay": source.decay} for name, source in sources.items()},
            "blends": blends,
            "new_items": new_items,
        },
        "unlearned": dict(unlearned.weights),
        "earned": earned | {"unlearned": list(unlearned.earned)},
        "num_cases": len(cases),
    }
    (out / ABOUT).write_text(json.dumps(about, indent=1))


def _read_best(table: SimilarTable, cases: Cases, *, repeats: bool) -> Source:
    """Return the table with the reading of the highest NDCG@10; the default unless another is shown to be better."""
    default, *others = (Source(table, newest, decay) for newest, decay in _READINGS)
    if len(cases) < MIN_CASES:
        return default
    before_N = _gains(default, cases, repeats=repeats)
    for other in others:
        after_N = _gains(other, cases, repeats=repeats)
        if interval(after_N - before_N, seed=0)[0] > 0:
            default, before_N = other, after_N
    return default


def _gains(source: Source, cases: Cases, *, repeats: bool) -> np.ndarray:
    """Return each case's NDCG@10 (N,) by this source alone."""
    return candidates_of(cases, None, {"source": source}, repeats=repeats).gains(np.array([0.0, 1.0]))


def make_serving(judged: Path, tokenized: Path, students_dir: Path, out: Path, progress: Progress = silent) -> None:
    """Write the tables of the serving pair by the mix that was chosen for the judged pair."""
    shutil.copyfile(judged / ABOUT, out / ABOUT)
    _save_tables(tokenized, mix.read_sources(tokenized, students_dir, progress), mix.read_found(judged), out, progress)


def _save_tables(
    tokenized: Path, related: mix.Sources, mixed: Mapping[str, Any], out: Path, progress: Progress
) -> dict[str, SimilarTable]:
    (out / mix.ABOUT).write_text(json.dumps(mixed, indent=1))
    num_items = len(load_catalogue(tokenized / "catalogue.parquet").item_ids)
    num = num_neighbours(num_items)
    tables = {
        TRANSITIONS: as_table(count_transitions(read_sequences(tokenized), num_items, num, read_counts(tokenized))),
        SIMILAR: mix.table_of(related, mix.Mix(**mixed["mix"])),
    }
    if any(texts := read_texts(tokenized)):
        tables[TEXT] = as_table(nearest(fit_text(texts, TEXT_SIZE, seed=0).encode(texts), num, progress))
    for name, table in tables.items():
        table.save(out / name)
    return tables


def as_table(neighbours: Neighbours) -> SimilarTable:
    """Return the candidates as a table; scores above 0 in float16."""
    scores_VN = neighbours.figures_VC.astype(np.float16)
    return SimilarTable(np.where(scores_VN > 0, neighbours.items_VC, NONE).astype(np.int32), scores_VN)


def _blends(candidates: Candidates, names: tuple[str, ...], chosen: Chosen) -> list[dict[str, Any]]:
    """Return the rows of a manifest: the weights by history length; none if no source adds anything."""
    if not chosen.weights.keys() - {MODEL}:
        return []
    rows = []
    for first, last in HISTORIES.values():
        lengths_N = candidates.lengths_N
        is_in_N = (lengths_N >= first) & (lengths_N <= (np.inf if last is None else last))
        weights = choose_in_slice(candidates.of(is_in_N), names, chosen.weights)
        rows.append({"history": [first, last], "weights": weights})
    return rows
