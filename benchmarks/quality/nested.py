"""The nested test: the published models compared with the models that the gate evaluated, on labels unseen by both.

Each user's last label, and later events, are held out from everything. The whole pipeline runs on the earlier events,
including gate and publication. Then the published pair and the evaluated pair of the same bundle rank the held-out
labels, from the histories that the feature store would serve.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from rich.console import Console

from benchmarks.quality.summary import POOLING
from models.bundle import Bundle, learned_repeats
from models.catalogue import Catalogue
from models.registry import BundleStore
from pipelines.data.examples import MIN_EVENTS_TO_EVALUATE, Cases
from pipelines.evaluation.pair import load_pair
from pipelines.features.tables import latest_histories
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import run_pipeline
from pipelines.scoring.metrics import gains, interval, rank_labels
from services.contracts.event_roles import Role

PROTOCOL = "each user's last label is held out from everything; the whole flow runs on what is before; all items ranked, as served, mean rank on ties"


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedRun:
    """One run of the pipeline: each user's NDCG@10 of the held-out label by model, in the same order for all seeds."""

    seed: int
    dataset: str
    published: Mapping[str, np.ndarray]
    unrefitted: Mapping[str, np.ndarray]
    refit: Mapping[str, Any] | None
    """The pipeline's facts about its refit; None for a run without a refit."""


def measure_nested(options: PipelineOptions, places: Places, console: Console) -> NestedRun:
    """Hold the labels out, run the pipeline, and rank them. Raises the pipeline's errors and the gate's refusal."""
    ingested = run_pipeline(replace(options, until="ingest"), places, console).stages[0]
    folder = places.state_dir / "nested" / ingested.key
    name = options.events.stem if options.events else options.dataset
    events, items, labels = hold_out(ingested.path, folder, name)
    seed = options.recipes[0].train.seed
    own = replace(places, bundle_root=folder / f"bundles-{seed}")
    shutil.rmtree(own.bundle_root, ignore_errors=True)  # an earlier run's bundle must not be compared with
    report = run_pipeline(replace(options, events=events, items=items), own, console)
    features = next(stage.path for stage in report.stages if stage.stage == "features")
    bundle = BundleStore.of(own).live()
    cases = _cases(labels, features, bundle.catalogue())
    return NestedRun(
        seed=seed,
        dataset=name,
        published=_ndcg(bundle.path, bundle, cases),
        unrefitted=_ndcg(bundle.judged_dir, bundle, cases),
        refit=bundle.manifest.get("refit"),
    )


def hold_out(ingested: Path, out: Path, name: str) -> tuple[Path, Path, dict[str, str]]:
    """Write tables without each user's last label and later events; return their paths, and the label's item by user.

    Only users with at least three labels have one, as in the test split.
    """
    out.mkdir(parents=True, exist_ok=True)
    positive = pl.read_parquet(ingested / "events.parquet").filter(pl.col("role") == Role.POSITIVE)
    last = positive.group_by("user_id").agg(pl.len(), pl.col("item_id", "event_time").last())
    last = last.filter(pl.col("len") >= MIN_EVENTS_TO_EVALUATE).rename({"event_time": "held_from"})
    arrived = pl.read_parquet(ingested / "arrivals.parquet")
    dated = arrived.join(last.select("user_id", "held_from"), on="user_id", how="left", maintain_order="left")
    kept = dated.filter(pl.col("held_from").is_null() | (pl.col("row_time") < pl.col("held_from")))
    events, items = out / f"{name}.parquet", out / f"{name}_items.parquet"
    kept.select("user_id", "item_id", "event_time", "event_type", "value").write_parquet(events)
    shutil.copyfile(ingested / "items.parquet", items)
    return events, items, dict(last.select("user_id", "item_id").iter_rows())


def summarise_nested(runs: Sequence[NestedRun]) -> dict[str, Any]:
    """Return the content of the results file without its header. All runs use the same data set."""
    rows = []
    for model in runs[0].published:
        new, old = (
            np.mean([getattr(run, pair)[model] for run in runs], axis=0) for pair in ("published", "unrefitted")
        )
        low, high = interval(new - old, seed=0)
        means = {"ndcg10": float(new.mean()), "unrefitted_ndcg10": float(old.mean())}
        by_seed = [float(run.published[model].mean() / run.unrefitted[model].mean()) for run in runs]
        difference = {"ratio": float(new.mean() / old.mean()), "low": low, "high": high, "ratio_by_seed": by_seed}
        rows.append({"model": model, **means, **difference, "num_seeds": len(runs), "num_users": len(new)})
    about = {"dataset": runs[0].dataset, "protocol": PROTOCOL, "pooling": POOLING, "nested": rows}
    return about | {"runs": [{"seed": run.seed, "refit": run.refit} for run in runs]}


def _cases(labels: Mapping[str, str], features: Path, catalogue: Catalogue) -> Cases:
    rows = [row for row in latest_histories(features) if row.user_id in labels]
    rows.sort(key=lambda row: row.user_id)
    histories = tuple(np.array(catalogue.indices(row.item_ids), dtype=np.int64) for row in rows)
    targets = np.array([catalogue.index_of[labels[row.user_id]] for row in rows])
    return Cases(tuple(row.user_id for row in rows), histories, targets, np.full(len(rows), np.nan))


def _ndcg(pair: Path, bundle: Bundle, cases: Cases) -> dict[str, np.ndarray]:
    """Rank the labels with both models of this folder."""
    scorers = load_pair(pair, torch.device("cpu")).scorers(bundle.catalogue(), **bundle.manifest["prompt"])
    repeats = learned_repeats(bundle.manifest)
    return {name: gains(rank_labels(scorer, cases).as_served(repeats=repeats), 10) for name, scorer in scorers.items()}
