"""Summary of several runs: a row per model, gains of distillation and slices, and the value of routing.

All seeds of a split test the same users. A user's NDCG@10 is averaged over the seeds first, and intervals are 95 %
bootstraps of the mean over users: they cover the sampling of users. The variance of training is reported as `..._std`,
the standard deviation between the seeds' means (null for one seed). Pure; numpy only.

Shape suffixes: S seeds, N users.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks.quality.fresh import FRESH
from benchmarks.quality.variants import UNRAISED
from pipelines.evaluation.gain import gain_by_slice, histories_that_pay, served_as
from pipelines.scoring.metrics import Ranks, gains, hit_rate, interval

POOLING = (
    "each user's NDCG@10 is the mean over the seeds; ci95, low and high: 95 % bootstrap of its mean over users, "
    "paired for differences; _std: standard deviation between the seeds' means"
)
_METRICS = {
    "hr10": "hr@10",
    "ndcg10": "ndcg@10",
    "hr10_unmasked": "hr@10_unmasked",
    "ndcg10_unmasked": "ndcg@10_unmasked",
}
"""The name of a metric in an evaluation, by its name in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRun:
    """One training and its evaluation. Arrays have a value per test user, in equal order for all seeds of a split."""

    seed: int
    split: str
    evaluation: Mapping[str, Any]
    """The report of the evaluation."""
    ranks: Mapping[str, np.ndarray]
    """The label's rank as served, by model of the evaluation."""
    variants: Mapping[str, Ranks]
    """The label's rank with and without seen items, by model of variants.py."""
    earned: Mapping[str, Any]
    """The gain of distillation on validation labels, and whether the served student used the decoder's targets."""
    slices: Mapping[str, np.ndarray]
    level_sizes: Sequence[int]
    """The number of codes of each level: one level if an item is one token."""
    num_parameters: Mapping[str, Mapping[str, int]]
    """Parameters by model: all, and those outside the item table."""
    llm_price_ndcg_per_ms: float

    @property
    def decoder_ms(self) -> dict[str, float]:
        """The decoder's time per request, by slice of history length."""
        return {row["slice"]: row["decoder_ms"] for row in self.evaluation["gain"] if "decoder_ms" in row}

    def served_rank(self, model: str) -> np.ndarray:
        """Return the rank of each user's label for the models of the evaluation or the variants."""
        if model in self.ranks:
            return self.ranks[model]
        return self.variants[model].as_served(repeats=self.evaluation["repeats"])

    def ndcg(self, model: str) -> np.ndarray:
        """Return each user's NDCG@10 for the models of the evaluation or the variants."""
        return gains(self.served_rank(model), 10)

    def served_ndcg(self, model: str) -> np.ndarray:
        """Return each user's NDCG@10 for a model as served: mixed with the sources, if it has a mix."""
        return self.ndcg(served_as(model, self.ranks))

    def metric(self, model: str, key: str) -> float:
        """Return a metric's mean over the users, by its name in an evaluation."""
        if model not in (known := self.evaluation["metrics"]) and model.startswith("mixed_"):
            model = model.removeprefix("mixed_")  # this seed's training mixes no sources into it
        if model in known:
            return float(self.evaluation["metrics"][model][key])
        ranks, repeats = self.variants[model], self.evaluation["repeats"] or key.endswith("_unmasked")
        chosen = ranks.as_served(repeats=repeats)
        return hit_rate(chosen, 10) if key.startswith("hr") else float(gains(chosen, 10).mean())

    def is_routed(self) -> np.ndarray:
        """Return the users for the LLM in the run's bundle: the history lengths with a proven gain."""
        paying = histories_that_pay(self.evaluation["gain"], self.llm_price_ndcg_per_ms)
        routed = np.zeros_like(self.slices["all"])
        for name in paying:
            routed |= self.slices[name]
        return routed

    def ms_by_user(self) -> np.ndarray:
        """Return the decoder's time for each user's request, by history length."""
        by_user: np.ndarray = np.sum([ms * self.slices[name] for name, ms in self.decoder_ms.items()], axis=0)
        return by_user


def summarise(runs: Sequence[QualityRun]) -> dict[str, Any]:
    """Return the content of the results file without its header. All runs use the same data set."""
    splits = {split: [run for run in runs if run.split == split] for split in dict.fromkeys(run.split for run in runs)}
    evaluation = runs[0].evaluation
    tables = {
        "rows": _rows,
        "distillation": _distillation,
        "mixer": _mixer,
        "new_items": _new_items,
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


def _rows(runs: Sequence[QualityRun]) -> Iterator[dict[str, Any]]:
    for model in dict.fromkeys((*runs[0].evaluation["metrics"], *runs[0].variants)):
        of_seeds = {name: [run.metric(model, key) for run in runs] for name, key in _METRICS.items()}
        means = {name: fmean(values) for name, values in of_seeds.items()}
        spreads = {f"{name}_std": _spread(of_seeds[name]) for name in ("hr10", "ndcg10")}
        ci95 = list(interval(_by_user(runs, model), seed=0))
        num = {"num_seeds": len(runs), "num_users": len(runs[0].slices["all"])}
        yield {"model": model, **means, "ci95": ci95, **spreads, **num}


def _distillation(runs: Sequence[QualityRun]) -> Iterator[dict[str, Any]]:
    """Yield gains: distilled student over one without targets, or targets and rows; served student over the graph."""
    pairs = [("distilled", "twin"), ("distilled", "student_alone"), ("student", "student_alone"), ("student", "graph")]
    for model, other in pairs:
        yield {"model": model, "over": other} | _difference([(run.ndcg(model), run.ndcg(other)) for run in runs])


def _mixer(runs: Sequence[QualityRun]) -> Iterator[dict[str, Any]]:
    """Yield the gain of each model as served over the model without sources, and over the sources without a model."""
    for model in ("student", "decoder"):
        for other in (model, "unlearned"):
            if all(other in run.ranks for run in runs):
                pairs = [(run.served_ndcg(model), run.ndcg(other)) for run in runs]
                yield {"model": f"mixed_{model}", "over": other} | _difference(pairs)
    pairs = [(run.ndcg(FRESH), run.served_ndcg("student")) for run in runs]
    yield {"model": FRESH, "over": "mixed_student"} | _difference(pairs)


def _new_items(runs: Sequence[QualityRun]) -> Iterator[dict[str, Any]]:
    """Yield the recall of labels without training events among all items, and the other labels' difference in NDCG@10.

    The difference is that of the served mix from the same mix without the factors of new items.
    """
    is_new = runs[0].slices.get("item new")
    if is_new is None:
        return
    ranks = {name: np.array([run.served_rank(name)[is_new] for run in runs]) for name in ("student", UNRAISED)}
    ranks["mixed_student"] = np.array([run.served_rank(served_as("student", run.ranks))[is_new] for run in runs])
    pairs = [(run.served_ndcg("student")[~is_new], run.ndcg(UNRAISED)[~is_new]) for run in runs]
    recall = {f"{name}_recall10": float((label_ranks <= 10).mean()) for name, label_ranks in ranks.items()}
    yield {"num_cases": int(is_new.sum())} | recall | {"others": _difference(pairs)}


def _difference(of_seeds: Iterable[tuple[np.ndarray, ...]]) -> dict[str, float | None]:
    """Return the pooled difference between two models' NDCG@10, from each user's values by seed."""
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


def _gain(runs: Sequence[QualityRun]) -> Iterator[dict[str, Any]]:
    of_seeds = [{row["slice"]: row["llm_minus_student"] for row in run.evaluation["gain"]} for run in runs]
    for row in gain_by_slice(_served(runs, "decoder"), _served(runs, "student"), runs[0].slices):
        yield row | {"llm_minus_student_std": _spread([by_slice[row["slice"]] for by_slice in of_seeds])}


def _routing(runs: Sequence[QualityRun]) -> Iterator[dict[str, Any]]:
    """Yield the gain and cost of each policy, by each seed's own gain table, averaged over seeds and users."""
    llm_SN, student_SN = (np.array([run.served_ndcg(model) for run in runs]) for model in ("decoder", "student"))
    ms_SN, routed_SN = np.array([run.ms_by_user() for run in runs]), np.array([run.is_routed() for run in runs])
    always_SN = np.ones_like(routed_SN)
    for policy, is_llm_SN in (("always-llm", always_SN), ("always-student", ~always_SN), ("routed", routed_SN)):
        ndcg = float(np.where(is_llm_SN, llm_SN, student_SN).mean())
        ms = float((ms_SN * is_llm_SN).mean())
        per_ms, share = ndcg / ms if ms else None, float(is_llm_SN.mean())
        cost = {"decoder_ms_per_request": ms, "ndcg_per_decoder_ms": per_ms}
        yield {"policy": policy, "ndcg10": ndcg} | cost | {"llm_share": share}


def _about(run: QualityRun) -> dict[str, Any]:
    """Return the recorded fields of each run."""
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


def _by_user(runs: Sequence[QualityRun], model: str) -> np.ndarray:
    if model.startswith("mixed_"):
        return _served(runs, model.removeprefix("mixed_"))
    mean: np.ndarray = np.mean([run.ndcg(model) for run in runs], axis=0)
    return mean


def _served(runs: Sequence[QualityRun], model: str) -> np.ndarray:
    mean: np.ndarray = np.mean([run.served_ndcg(model) for run in runs], axis=0)
    return mean


def _spread(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None
