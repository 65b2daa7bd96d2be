"""Canary analysis: compares guard metrics with the live version within budgets, at any number of looks. Pure.

All guards together find an equal candidate worse in at most `alpha` of all releases: each guard has its weighted part
of `alpha`, over all looks. Counts begin with the stage; the stages of a release divide `alpha`. Metrics that are means
are asymptotic and need `MIN_USERS` per variant; fractions of users are exact.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pipelines.experiments.sequential import half_width, ratio_interval
from pipelines.experiments.user_sums import UserSums, difference_variance
from services.errors import ConfigError

ALPHA = 0.05
MIN_USERS = 100
"""Minimum users of each variant for the analysis of a mean."""


class Outcome(StrEnum):
    """Result of the analysis."""

    CONTINUE = "continue"
    WORSE = "worse"
    BETTER = "better"
    NO_WORSE = "no worse"
    UNDECIDED = "no result in time"


class State(StrEnum):
    """State of one guard."""

    OPEN = "open"
    WORSE = "worse"
    BETTER = "better"
    NO_WORSE = "no worse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A metric that a candidate must not worsen. Fractions are relative to the control's value.

    Args:
        name: The guard's entry of the counts.
        higher_is_worse: True for latency and errors, False for clicks.
        budget: The relative loss that the candidate may have.
        effect: The effect that the test targets; a guard is "no worse" once the candidate is shown to be worse by less
            than this.
        weight: The guard's part of alpha, relative to the other guards' weights.
        is_objective: Whether a better value makes the candidate better.
        tolerance: For rare events: a guard is also "no worse" once its events are shown to affect less than this
            additional fraction of lists.
        is_awaited: Whether an open guard delays the outcome. A guard that is not awaited can still be worse.
    """

    name: str
    higher_is_worse: bool = True
    budget: float = 0.0
    effect: float = 0.1
    weight: float = 1.0
    is_objective: bool = False
    tolerance: float = 0.0
    is_awaited: bool = True

    def __post_init__(self) -> None:
        """Check the numbers. Raises ConfigError naming the guard and the field."""
        for field, value, is_right, example in (
            ("budget", self.budget, 0 <= self.budget < 1, "0 to below 1, such as 0.02"),
            ("effect", self.effect, 0 < self.effect < math.inf, "above 0, such as 0.1"),
            ("weight", self.weight, 0 < self.weight < math.inf, "above 0, such as 1"),
            ("tolerance", self.tolerance, 0 <= self.tolerance < 1, "0 to below 1, such as 0.01"),
        ):
            if not is_right:
                raise ConfigError(f"guard {self.name}: {field} is {value}; give {example}")


@dataclass(frozen=True, slots=True)
class Means:
    """The sums behind a mean of each variant."""

    candidate: UserSums
    control: UserSums


@dataclass(frozen=True, slots=True)
class Affected:
    """Users of each variant affected at least once since the stage began by a rare event.

    Rare events are failed calls and missed deadlines, for example; `lists` counts the affected lists.
    """

    candidate: int
    control: int
    lists: Means | None = None


Counts = Mapping[str, Means | Affected]
"""By guard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardResult:
    """One guard's estimate: how much worse the candidate is, relative to the control, with its interval.

    Each side of the interval is at the guard's alpha. Negative values are better. NaN and infinities without enough
    data; `lacks` says what an open guard needs.
    """

    name: str
    state: State
    worse_by: float
    low: float
    high: float
    lacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisResult:
    """The outcome, the reason in a sentence, and each guard's reading."""

    outcome: Outcome
    reason: str
    readings: tuple[GuardResult, ...]


def verdict(
    guards: Sequence[Guard],
    counts: Counts,
    *,
    share: float,
    elapsed_s: float,
    limit_s: float = math.inf,
    alpha: float = ALPHA,
) -> AnalysisResult:
    """Analyse the counts so far.

    Args:
        guards: The guards, each with its entry of `counts`.
        counts: Sums and users of this stage.
        share: The candidate's fraction of both variants' users, as divided by the hash.
        elapsed_s: Seconds since the stage began.
        limit_s: Seconds after which the stage should have a result.
        alpha: How often an equal candidate may be found worse, over all guards and looks.

    Raises:
        ConfigError: A guard has no counts, or the fraction is invalid.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share: {share} is out of range; give the candidate's share of users, above 0 and below 1")
    whole = sum(guard.weight for guard in guards)
    readings = tuple(_read(guard, counts, share, alpha * guard.weight / whole) for guard in guards)
    objectives = {guard.name for guard in guards if guard.is_objective}
    awaited = {guard.name for guard in guards if guard.is_awaited}
    open_ones = [reading for reading in readings if reading.state is State.OPEN and reading.name in awaited]
    if worse := [reading for reading in readings if reading.state is State.WORSE]:
        return AnalysisResult(outcome=Outcome.WORSE, reason="; ".join(map(_describe, worse)), readings=readings)
    if better := [reading for reading in readings if reading.state is State.BETTER and reading.name in objectives]:
        return AnalysisResult(outcome=Outcome.BETTER, reason="; ".join(map(_describe, better)), readings=readings)
    if not open_ones:
        known = [reading for reading in readings if reading.state is not State.OPEN]
        return AnalysisResult(outcome=Outcome.NO_WORSE, reason="; ".join(map(_describe, known)), readings=readings)
    outcome = Outcome.UNDECIDED if elapsed_s >= limit_s else Outcome.CONTINUE
    return AnalysisResult(outcome=outcome, reason="; ".join(reading.lacks for reading in open_ones), readings=readings)


def _read(guard: Guard, counts: Counts, share: float, alpha: float) -> GuardResult:
    count = counts.get(guard.name)
    if count is None:
        raise ConfigError(f"guard {guard.name}: no counts; give a guard on one of {', '.join(counts)}")
    if isinstance(count, Means):
        return _read_means(guard, count, alpha)
    low, high = (bound - 1 for bound in ratio_interval(count.candidate, count.control, share, alpha))
    odds = (1 - share) / share
    worse_by = count.candidate * odds / count.control - 1 if count.control else math.nan
    lacks = (
        f"{guard.name}: happened to {count.candidate} users of the candidate and {count.control} of the control, too "
        "few for a test"
    )
    reading = _reading(guard, worse_by, low, high, lacks)
    if not guard.tolerance or count.lists is None or reading.state is not State.OPEN:
        return reading
    most = _most_added(guard, count.lists, alpha)
    if most <= guard.tolerance:
        return replace(reading, state=State.NO_WORSE, lacks="")
    added = "any number" if math.isinf(most) else f"{most:.2%}"
    return replace(
        reading,
        lacks=f"{lacks}; up to {added} more of the lists may be affected, and {guard.tolerance:.2%} are tolerated",
    )


def _most_added(guard: Guard, lists: Means, alpha: float) -> float:
    """Return the upper bound on the candidate's additional fraction of affected lists.

    The bound is that of a mean, with at least the variance of one list in each variant.
    """
    candidate, control = lists.candidate, lists.control
    if min(candidate.num_users, control.num_users) < MIN_USERS:
        return math.inf
    least = 1 / candidate.exposure**2 + 1 / control.exposure**2
    variance = max(least, difference_variance(candidate, control))
    return candidate.mean - control.mean + half_width(variance, guard.tolerance, alpha)


def _read_means(guard: Guard, means: Means, alpha: float) -> GuardResult:
    candidate, control = means.candidate, means.control
    fewest = min(candidate.num_users, control.num_users)
    if fewest < MIN_USERS or not control.total > 0:
        lacks = (
            f"{guard.name}: one version has {fewest} users, a mean needs {MIN_USERS}"
            if fewest < MIN_USERS
            else f"{guard.name}: the control has no counts yet"
        )
        return _reading(guard, math.nan, -math.inf, math.inf, lacks)
    sign = 1 if guard.higher_is_worse else -1
    scale = control.mean
    variance = difference_variance(candidate, control, 1 + sign * guard.budget)
    worse_by = sign * (candidate.mean - control.mean) / scale
    half = half_width(variance, guard.effect * scale, alpha) / scale if variance else 0.0
    factor = (half / guard.effect) ** 2
    lacks = (
        f"{guard.name}: {_range(worse_by, worse_by - half, worse_by + half)}; to be within {guard.effect:.0%} takes "
        f"some {max(1.1, factor):.1f} times the users"
    )
    return _reading(guard, worse_by, worse_by - half, worse_by + half, lacks)


def _reading(guard: Guard, worse_by: float, low: float, high: float, lacks: str) -> GuardResult:
    state = State.OPEN
    if low > guard.budget:
        state = State.WORSE
    elif high < 0:
        state = State.BETTER
    elif high < max(guard.budget, guard.effect):
        state = State.NO_WORSE
    return GuardResult(
        name=guard.name,
        state=state,
        worse_by=worse_by,
        low=low,
        high=high,
        lacks=lacks if state is State.OPEN else "",
    )


def _describe(reading: GuardResult) -> str:
    return f"{reading.name} {reading.state}: {_range(reading.worse_by, reading.low, reading.high)}"


def _range(worse_by: float, low: float, high: float) -> str:
    estimate = "" if math.isnan(worse_by) else f"worse by {worse_by:+.1%}, "
    return f"{estimate}interval {low:+.1%} to {high:+.1%}"
