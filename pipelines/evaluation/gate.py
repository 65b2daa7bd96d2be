"""The gate before publication: minimum quality of decoder and student. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.errors import ConfigError, StageFailed

METRIC = "ndcg@10"
BASELINES = ("popularity", "bigram", "item_knn")
"""The baselines, weakest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """The decoder must beat `baseline`, and the student must too and keep this share of the decoder's NDCG@10 (masked)."""

    baseline: str = "item_knn"
    min_student_share: float = 0.95

    def __post_init__(self) -> None:
        """Refuse what cannot be checked. Raises ConfigError naming the option."""
        if self.baseline not in BASELINES:
            raise ConfigError(f"--baseline: {self.baseline!r} is not known; give one of {', '.join(BASELINES)}")
        if not 0 <= self.min_student_share < math.inf:
            raise ConfigError(
                f"--min-student-share: {self.min_student_share} is no share; give 0 or more, such as 0.95"
            )


def student_share(metrics: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the student's NDCG@10 as a share of the decoder's; 0 when the decoder has none."""
    decoder = metrics["decoder"][METRIC]
    return float(metrics["student"][METRIC] / decoder) if decoder else 0.0


def check(metrics: Mapping[str, Mapping[str, Any]], options: GateOptions, of_the_data: Sequence[str] = ()) -> None:
    """Check an evaluation. Raises StageFailed with everything that is below its minimum, and with what was found `of_the_data`."""
    floor = metrics[options.baseline][METRIC]
    decoder, student = metrics["decoder"][METRIC], metrics["student"][METRIC]
    problems = [
        f"the {name}'s {METRIC} of {found:.4f} does not beat {options.baseline}'s {floor:.4f}"
        for name, found in (("decoder", decoder), ("student", student))
        if found <= floor
    ]
    if student_share(metrics) < options.min_student_share:
        problems.append(
            f"the student's {METRIC} of {student:.4f} is {student_share(metrics):.1%} of the decoder's {decoder:.4f}, "
            f"under {options.min_student_share:.0%}"
        )
    problems += of_the_data
    if problems:
        raise StageFailed("gate", "; ".join(problems) + "; nothing was published")
