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
_NOT_PUBLISHED = "nothing was published (--force publishes all the same)"


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
    baseline = options.baseline if options.baseline != BEST else max(BASELINES, key=lambda name: metrics[name][METRIC])
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
        for row in against_live
        if row["high"] < -options.max_loss * row["champion_ndcg"]
    ]


def refuse(problems: Sequence[str], outcome: str = _NOT_PUBLISHED) -> None:
    """Raise StageFailed if there are any, with the outcome of the run."""
    if problems:
        raise StageFailed("gate", "; ".join((*problems, outcome)))
