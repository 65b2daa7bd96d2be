"""The gate before publication: decoder and student against the baselines, each other, and the live bundle's. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.errors import ConfigError, StageFailed

METRIC = "ndcg@10"
BASELINES = ("popularity", "bigram", "item_knn")
"""The baselines, weakest first."""
BEST = "best"
NOT_PUBLISHED = "nothing was published (--force publishes all the same)"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """The bounds.

    Args:
        baseline: What decoder and student must beat; `best` is the best of all.
        min_student_share: The student must keep this share of the decoder's NDCG@10.
        max_loss: A model is refused when it is worse than the live bundle's by more than this share, beyond the 95 % interval.
    """

    baseline: str = BEST
    min_student_share: float = 0.95
    max_loss: float = 0.02

    def __post_init__(self) -> None:
        """Refuse what cannot be checked. Raises ConfigError naming the option."""
        if self.baseline not in {BEST, *BASELINES}:
            raise ConfigError(
                f"--baseline: {self.baseline!r} is not known; give one of {', '.join((BEST, *BASELINES))}"
            )
        if not 0 <= self.max_loss <= 1:
            raise ConfigError(f"--max-loss: {self.max_loss} is no share; give 0 to 1, such as 0.02")
        if not 0 <= self.min_student_share < math.inf:
            raise ConfigError(
                f"--min-student-share: {self.min_student_share} is no share; give 0 or more, such as 0.95"
            )


def student_share(metrics: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the student's NDCG@10 as a share of the decoder's; 0 when the decoder has none."""
    decoder = metrics["decoder"][METRIC]
    return float(metrics["student"][METRIC] / decoder) if decoder else 0.0


def find_problems(
    metrics: Mapping[str, Mapping[str, Any]], against_live: Sequence[Mapping[str, Any]], options: GateOptions
) -> list[str]:
    """Return what is beyond its bound. `against_live` are the rows of `pipelines.evaluation.champion`."""
    baseline = _baseline(metrics, options)
    floor = metrics[baseline][METRIC]
    decoder, student = metrics["decoder"][METRIC], metrics["student"][METRIC]
    problems = [
        f"the {name}'s {METRIC} of {found:.4f} does not beat {baseline}'s {floor:.4f}"
        for name, found in (("decoder", decoder), ("student", student))
        if found <= floor
    ]
    if student_share(metrics) < options.min_student_share:
        problems.append(
            f"the student's {METRIC} of {student:.4f} is {student_share(metrics):.1%} of the decoder's {decoder:.4f}, "
            f"under {options.min_student_share:.0%}"
        )
    return problems + [
        f"the {row['model']}'s {METRIC} of {row['challenger_ndcg']:.4f} is below that of the live bundle {row['champion']}, "
        f"{row['champion_ndcg']:.4f} on the same {row['num_users']} users: 95 % interval of the difference "
        f"{row['low']:+.4f} to {row['high']:+.4f}, beyond -{options.max_loss:.0%} (--max-loss)"
        for row in _lost(against_live, options)
    ]


def next_steps(
    metrics: Mapping[str, Mapping[str, Any]],
    against_live: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any],
    options: GateOptions,
) -> list[str]:
    """Return what one can do about models that are refused, a sentence each. `data` has the facts of `pipelines.data.checks`."""
    found = {name: metrics[name][METRIC] for name in (*BASELINES, "decoder", "student")}
    weaker = min(("student", "decoder"), key=lambda name: found[name])
    floor = _baseline(metrics, options)
    steps = []
    if found[weaker] <= found[floor]:
        steps.append(
            f"{floor} won: its {METRIC} of {found[floor]:.4f} is {found[floor] - found[weaker]:.4f} above the {weaker}'s {found[weaker]:.4f}; "
            "for data like this so simple a method may be enough"
        )
        steps.append(
            f"more data: these are {data['num_events']} events of {data['num_users']} users on {data['num_items']} items, and more users "
            "and longer histories usually help the models more than a baseline"
        )
        beaten = [name for name in BASELINES if found[name] < found[weaker]]
        steps.append(
            f"--baseline {beaten[-1]} asks for less: both models beat {' and '.join(beaten)}"
            if beaten
            else "no baseline is beaten by both models, so --baseline is no way on: look at what the run found of events and roles"
        )
    if student_share(metrics) < options.min_student_share:
        steps.append("--student-epochs trains the student longer, --min-student-share asks for less of it")
    if lost := _lost(against_live, options):
        steps.append(
            f"{lost[0]['champion']} stays live, whose models are better: train whole (without --warm-start), "
            "or accept a larger loss by --max-loss"
        )
    return steps


def refuse(problems: Sequence[str], outcome: str = NOT_PUBLISHED, advice: Sequence[str] = ()) -> None:
    """Raise StageFailed if there are any, with the outcome of the run and what one can do."""
    if problems:
        raise StageFailed("gate", "; ".join((*problems, outcome)), advice)


def _baseline(metrics: Mapping[str, Mapping[str, Any]], options: GateOptions) -> str:
    """Return the name of the baseline that must be beaten."""
    return options.baseline if options.baseline != BEST else max(BASELINES, key=lambda name: metrics[name][METRIC])


def _lost(against_live: Sequence[Mapping[str, Any]], options: GateOptions) -> list[Mapping[str, Any]]:
    """Return the rows of the models that are worse than the live bundle's beyond the bound."""
    return [row for row in against_live if row["high"] < -options.max_loss * row["champion_ndcg"]]
