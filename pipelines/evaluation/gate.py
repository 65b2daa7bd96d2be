"""The gate before publication: tests decoder and student against a floor, the live bundle and the reference. Pure.

The live bundle changes each night, so small losses add up. Only a person moves the reference, and its bound has no
interval: over many nights, chance would otherwise let a forbidden loss pass.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pipelines.declaration import Option, check_bounds
from services.errors import StageFailed

METRIC = "ndcg@10"
BASELINES = ("popularity", "bigram", "item_knn")
"""The baselines, weakest first."""
SOURCES = ("transitions", "unlearned")
"""Untrained sources, which a floor may name. `best` excludes them: a model below them serves mixed with them."""
MODELS = ("decoder", "student")
"""What is judged."""
BEST = "best"
NOT_PUBLISHED = "nothing was published (--force publishes anyway)"


_FLOOR = "NDCG@10 that the {} must exceed, as a fraction of the baseline's."


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """The bounds of the gate, as fractions."""

    baseline: Annotated[
        str,
        Option(
            "Baseline of both floors: popularity, bigram, item_knn, the best of them, or an untrained source.",
            choices=(BEST, *BASELINES, *SOURCES),
        ),
    ] = BEST
    decoder_floor: Annotated[float, Option(_FLOOR.format("decoder"), at_least=0, below=math.inf)] = 1.0
    student_floor: Annotated[float, Option(_FLOOR.format("student"), at_least=0, below=math.inf)] = 1.0
    max_loss: Annotated[
        float,
        Option(
            "Largest loss of NDCG@10 against the live bundle, as a fraction; "
            "a loss counts if the 95 % interval is below 0.",
            at_least=0,
            at_most=1,
        ),
    ] = 0.02
    max_reference_loss: Annotated[
        float,
        Option(
            "Largest loss of NDCG@10 against the reference (`tailrace bundles reference`), without an interval.",
            at_least=0,
            at_most=1,
        ),
    ] = 0.05

    def __post_init__(self) -> None:
        """Validate the bounds. Raises ConfigError naming the option."""
        check_bounds(self)

    def floor(self, name: str) -> float:
        """Return this model's floor as a share of the baseline."""
        return {"decoder": self.decoder_floor, "student": self.student_floor}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The rows of `pipelines.evaluation.champion` against the live bundle and against the reference; may be empty."""

    live: Sequence[Mapping[str, Any]] = ()
    reference: Sequence[Mapping[str, Any]] = ()


def student_share(metrics: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the student's NDCG@10 as a share of the decoder's; 0 when the decoder has none."""
    decoder = metrics["decoder"][METRIC]
    return float(metrics["student"][METRIC] / decoder) if decoder else 0.0


def find_problems(metrics: Mapping[str, Mapping[str, Any]], compared: Compared, options: GateOptions) -> list[str]:
    """Return what is beyond its bound, a clause each: what lost against what, with numbers."""
    baseline = _baseline(metrics, options)
    return [
        *(
            f"the {name}'s {METRIC} of {own:.4f} is not above its floor of "
            f"{options.floor(name) * floor:.4f}, {options.floor(name):.0%} of {baseline}'s {floor:.4f} "
            f"(--{name}-floor)"
            for name in _below_floor(metrics, options)
            for own, floor in [_against(metrics, baseline, name)]
        ),
        *(
            f"{_worse(row)} that of the live bundle {_other(row)}: by more than {options.max_loss:.0%} (--max-loss), "
            f"and beyond the 95 % interval of the difference, {row['low']:+.4f} to {row['high']:+.4f}"
            for row in _lost_to_live(compared, options)
        ),
        *(
            (
                f"{_worse(row)} that of the reference {_other(row)}: by more than {options.max_reference_loss:.0%} "
                "(--max-reference-loss)"
            )
            for row in _lost_to_reference(compared, options)
        ),
    ]


def next_steps(
    metrics: Mapping[str, Mapping[str, Any]], compared: Compared, data: Mapping[str, Any], options: GateOptions
) -> list[str]:
    """Return what one can do about models that are refused, a sentence each.

    `data` has the facts of `pipelines.data.checks`.
    """
    ndcg = {name: _served(metrics, name) for name in (*BASELINES, *MODELS)}
    weaker = min(reversed(MODELS), key=lambda name: ndcg[name])
    floor = _baseline(metrics, options)
    ndcg.setdefault(floor, metrics[floor][METRIC])
    low = _below_floor(metrics, options)
    steps = []
    if low and ndcg[weaker] <= ndcg[floor]:
        steps.append(
            f"{floor} won: its {METRIC} of {ndcg[floor]:.4f} is {ndcg[floor] - ndcg[weaker]:.4f} above the "
            f"{weaker}'s {ndcg[weaker]:.4f}; for data like this so simple a method may be enough"
        )
        steps.append(
            f"more data: these are {data['num_events']} events of {data['num_users']} users on {data['num_items']} "
            "items, and more users and longer histories usually help the models more than a baseline"
        )
        beaten = [name for name in BASELINES if ndcg[name] < ndcg[weaker]]
        steps.append(
            f"--baseline {beaten[-1]} is a lower bar: both models beat {' and '.join(beaten)}"
            if beaten
            else (
                "no baseline is beaten by both models, so --baseline cannot help: check the run's counts of events "
                "and roles"
            )
        )
    epochs = {"decoder": "--epochs", "student": "--student-epochs"}
    steps += [f"{epochs[name]} trains the {name} longer, --{name}-floor asks for less of it" for name in low]
    if lost := _lost_to_live(compared, options):
        steps.append(
            f"{lost[0]['champion']} stays live, whose models are better: train whole (without --warm-start), "
            "or accept a larger loss by --max-loss"
        )
    if lost := _lost_to_reference(compared, options):
        steps.append(
            f"{lost[0]['champion']} is the reference until a person moves it: train whole (without --warm-start), or, "
            "if this loss is acceptable from now on,  set another reference: tailrace bundles reference VERSION"
        )
    return steps


def refuse(problems: Sequence[str], outcome: str = NOT_PUBLISHED, advice: Sequence[str] = ()) -> None:
    """Raise StageFailed if there are any, with the outcome of the run and what one can do."""
    if problems:
        raise StageFailed("gate", "; ".join((*problems, outcome)), advice)


def _baseline(metrics: Mapping[str, Mapping[str, Any]], options: GateOptions) -> str:
    return options.baseline if options.baseline != BEST else max(BASELINES, key=lambda name: metrics[name][METRIC])


def _served(metrics: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """Return a model's NDCG@10 as served: with the sources, if they are mixed in."""
    return float(metrics.get(f"mixed_{name}", metrics[name])[METRIC])


def _below_floor(metrics: Mapping[str, Mapping[str, Any]], options: GateOptions) -> list[str]:
    baseline, below = _baseline(metrics, options), []
    for name in MODELS:
        own, floor = _against(metrics, baseline, name)
        if own <= options.floor(name) * floor and not metrics[name].get("may_have_seen_labels"):
            below.append(name)
    return below


def _against(metrics: Mapping[str, Mapping[str, Any]], baseline: str, name: str) -> tuple[float, float]:
    """Return a model's NDCG@10 as served, and the baseline's, on the labels that an import cannot have seen."""
    judged = metrics[name].get("judged_ndcg@10")
    if judged is None:
        return _served(metrics, name), float(metrics[baseline][METRIC])
    return float(judged.get(f"mixed_{name}", judged[name])), float(judged[baseline])


def _lost_to_live(compared: Compared, options: GateOptions) -> list[Mapping[str, Any]]:
    """Return the rows of models that are significantly worse than the live bundle's, by more than the bound."""
    return [row for row in compared.live if row["high"] < 0 and _difference(row) < -options.max_loss]


def _lost_to_reference(compared: Compared, options: GateOptions) -> list[Mapping[str, Any]]:
    """Return the rows of the models that are worse than the reference's by more than the bound."""
    return [row for row in compared.reference if _difference(row) < -options.max_reference_loss]


def _difference(row: Mapping[str, Any]) -> float:
    """Return the difference as a share of the other model's NDCG; 0 where that has none."""
    before = row["champion_ndcg"]
    return float((row["challenger_ndcg"] - before) / before) if before else 0.0


def _worse(row: Mapping[str, Any]) -> str:
    return f"the {row['model']}'s {METRIC} of {row['challenger_ndcg']:.4f} is {-_difference(row):.1%} below"


def _other(row: Mapping[str, Any]) -> str:
    return f"{row['champion']}, {row['champion_ndcg']:.4f} on the same {row['num_users']} users"
