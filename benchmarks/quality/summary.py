"""What several runs come to: a row for each model, what distillation and seen items are worth, the decoder's gain by slice, and what routing by that gain is worth. Pure; numpy only.

All seeds of a split test the same users. A user's NDCG@10 is averaged over the seeds first, and intervals are 95 % bootstraps of the mean over users: they hold the luck of the draw of
users. The luck of training is beside them as `..._std`, the standard deviation between the seeds' means (null for one seed).

Shape suffixes: S seeds, N users.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from pipelines.evaluation.gain import gain_by_slice, histories_that_pay
from pipelines.scoring.metrics import Ranks, gains, hit_rate, interval

POOLING = (
    "each user's NDCG@10 is the mean over the seeds; ci95, low and high: 95 % bootstrap of its mean over users, paired for differences; "
    "_std: standard deviation between the seeds' means"
)
_METRICS = {
    "hr10": "hr@10",
    "ndcg10": "ndcg@10",
    "hr10_unmasked": "hr@10_unmasked",
    "ndcg10_unmasked": "ndcg@10_unmasked",
}
"""By name in a row, the metric's name in an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training and its evaluation. Arrays have a value for each test user, in the same order for all seeds of a split."""

    seed: int
    split: str
    evaluation: Mapping[str, Any]
    """The report of the evaluation."""
    ranks: Mapping[str, np.ndarray]
    """By model of the evaluation, the label's rank as served."""
    variants: Mapping[str, Ranks]
    """By model of variants.py, the same with seen items and without."""
    earned: Mapping[str, Any]
    """What distillation earned by validation, and whether the student that serves learned from the decoder's targets."""
    slices: Mapping[str, np.ndarray]
    level_sizes: Sequence[int]
    """The number of codes of each level: one level where an item is one token."""
    num_parameters: Mapping[str, Mapping[str, int]]
    """By model, all and those outside the table of items."""
    llm_price_ndcg_per_ms: float

    @property
    def decoder_ms(self) -> dict[str, float]:
        """By slice of the length of history, the decoder's time for one request."""
        return {row["slice"]: row["decoder_ms"] for row in self.evaluation["gain"] if "decoder_ms" in row}

    def ndcg(self, model: str) -> np.ndarray:
        """Return each user's NDCG@10, of the evaluation's models or the variants."""
        if model in self.ranks:
            return gains(self.ranks[model], 10)
        return gains(self.variants[model].as_served(repeats=self.evaluation["repeats"]), 10)

    def metric(self, model: str, key: str) -> float:
        """Return a mean over the users, by its name in an evaluation."""
        if model in self.evaluation["metrics"]:
            return float(self.evaluation["metrics"][model][key])
        ranks, repeats = self.variants[model], self.evaluation["repeats"] or key.endswith("_unmasked")
        chosen = ranks.as_served(repeats=repeats)
        return hit_rate(chosen, 10) if key.startswith("hr") else float(gains(chosen, 10).mean())

    def is_routed(self) -> np.ndarray:
        """Return for which users the run's bundle would call the LLM: those with a length of history for which it is shown to be worth its time."""
        paying = histories_that_pay(self.evaluation["gain"], self.llm_price_ndcg_per_ms)
        routed = np.zeros_like(self.slices["all"])
        for name in paying:
            routed |= self.slices[name]
        return routed

    def ms_by_user(self) -> np.ndarray:
        """Return the decoder's time for each user's request, which is that of the length of history."""
        by_user: np.ndarray = np.sum([ms * self.slices[name] for name, ms in self.decoder_ms.items()], axis=0)
        return by_user


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the content of the results file but its header. All runs are of one data set."""
    splits = {split: [run for run in runs if run.split == split] for split in dict.fromkeys(run.split for run in runs)}
    evaluation = runs[0].evaluation
    tables = {
        "rows": _rows,
        "distillation": _distillation,
        "seen_items": _seen_items,
        "gain": _gain,
        "routing": _routing,
    }
    return {
        "dataset": evaluation["dataset"],
        "repeats": evaluation["repeats"],
        "protocol": {split: of_split[0].evaluation["protocol"] for split, of_split in splits.items()},
        "pooling": POOLING,
        **{
            name: [{"split": split, **row} for split, of_split in splits.items() for row in rows_of(of_split)]
            for name, rows_of in tables.items()
        },
        "runs": [_about(run) for run in runs],
    }


def _rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    for model in dict.fromkeys((*runs[0].evaluation["metrics"], *runs[0].variants)):
        of_seeds = {name: [run.metric(model, key) for run in runs] for name, key in _METRICS.items()}
        means = {name: fmean(values) for name, values in of_seeds.items()}
        spreads = {f"{name}_std": _spread(of_seeds[name]) for name in ("hr10", "ndcg10")}
        ci95 = list(interval(_by_user(runs, model), seed=0))
        num = {"num_seeds": len(runs), "num_users": len(runs[0].slices["all"])}
        yield {"model": model, **means, "ci95": ci95, **spreads, **num}


def _distillation(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield what the distilled student has over one without the targets, over one without targets and rows, and what serves over the untrained graph."""
    pairs = [("distilled", "twin"), ("distilled", "student_alone"), ("student", "student_alone"), ("student", "graph")]
    for model, other in pairs:
        yield {"model": model, "over": other} | _difference([(run.ndcg(model), run.ndcg(other)) for run in runs])


def _seen_items(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield what the student that serves has over the same weights with seen items the other way."""
    both = []
    for run in runs:
        ranks, repeats = run.variants["student"], run.evaluation["repeats"]
        both.append(tuple(gains(ranks.as_served(repeats=served), 10) for served in (repeats, not repeats)))
    yield {"model": "student"} | _difference(both)


def _difference(of_seeds: Iterable[tuple[np.ndarray, ...]]) -> dict[str, float | None]:
    """Return how one model's NDCG@10 differs from another's, pooled, from each user's of both by seed."""
    both_S2N = np.array([*of_seeds])
    one_N, other_N = both_S2N.mean(axis=0)
    low, high = interval(one_N - other_N, seed=0)
    ratio = float(one_N.mean() / other_N.mean()) if other_N.any() else None
    means_S2 = both_S2N.mean(axis=2)
    return {
        "ndcg10": float(one_N.mean()),
        "other_ndcg10": float(other_N.mean()),
        "ratio": ratio,
        "difference": float((one_N - other_N).mean()),
        "low": low,
        "high": high,
        "difference_std": _spread((means_S2[:, 0] - means_S2[:, 1]).tolist()),
    }


def _gain(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    of_seeds = [{row["slice"]: row["llm_minus_student"] for row in run.evaluation["gain"]} for run in runs]
    for row in gain_by_slice(_by_user(runs, "decoder"), _by_user(runs, "student"), runs[0].slices):
        yield row | {"llm_minus_student_std": _spread([found[row["slice"]] for found in of_seeds])}


def _routing(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield what each policy gets and costs: of every seed by its own gain table, then the mean over seeds and users."""
    llm_SN, student_SN = (np.array([run.ndcg(model) for run in runs]) for model in ("decoder", "student"))
    ms_SN, routed_SN = np.array([run.ms_by_user() for run in runs]), np.array([run.is_routed() for run in runs])
    always_SN = np.ones_like(routed_SN)
    for policy, is_llm_SN in (("always-llm", always_SN), ("always-student", ~always_SN), ("routed", routed_SN)):
        ndcg = float(np.where(is_llm_SN, llm_SN, student_SN).mean())
        ms = float((ms_SN * is_llm_SN).mean())
        per_ms, share = ndcg / ms if ms else None, float(is_llm_SN.mean())
        cost = {"decoder_ms_per_request": ms, "ndcg_per_decoder_ms": per_ms}
        yield {"policy": policy, "ndcg10": ndcg} | cost | {"llm_share": share}


def _about(run: Run) -> dict[str, Any]:
    """Return what is kept of each run."""
    names = ("num_test_users", "num_items", "metrics", "gain", "multiply_adds")
    return {
        "seed": run.seed,
        "split": run.split,
        "level_sizes": list(run.level_sizes),
        "num_parameters": dict(run.num_parameters),
        "earned_in_validation": dict(run.earned),
        "decoder_ms": run.decoder_ms,
        "llm_price_ndcg_per_ms": run.llm_price_ndcg_per_ms,
        **{name: run.evaluation[name] for name in names},
    }


def _by_user(runs: Sequence[Run], model: str) -> np.ndarray:
    mean: np.ndarray = np.mean([run.ndcg(model) for run in runs], axis=0)
    return mean


def _spread(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None
