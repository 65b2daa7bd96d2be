"""The service level objectives as frozen types, and the loader of their file.

An objective compares two sums over the service's own counters: bad events and all events. Both are plain terms (a
selector and a sign), so that the PromQL writer and the console, which has only the metrics, compute the same figure.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from prometheus_client.utils import floatToGoString
from pydantic import ConfigDict, Discriminator, Field, StringConstraints, Tag, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from services.errors import ConfigError

OBJECTIVES_PATH = Path(__file__).resolve().parents[2] / "infra" / "prometheus" / "objectives.yaml"

_STRICT = ConfigDict(extra="forbid")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
AlertName = Annotated[str, StringConstraints(pattern=r"^Tailrace[A-Z][A-Za-z]+$")]
Duration = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*[smhd]$")]
Metric = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")]
Severity = Literal["page", "ticket"]


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Selector:
    """Series of one metric whose labels have one of the values in `match`; other labels are free."""

    metric: Metric
    match: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def selects(self, metric: str, labels: Mapping[str, str]) -> bool:
        return metric == self.metric and all(labels.get(name) in values for name, values in self.match.items())


@dataclass(frozen=True, slots=True)
class SignedSelector:
    """A selector whose series are added (sign 1) or subtracted (sign -1)."""

    sign: int
    selector: Selector


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Ratio:
    """Bad events out of all events, both counters."""

    total: Selector
    bad: Selector

    @property
    def total_terms(self) -> tuple[SignedSelector, ...]:
        return (SignedSelector(1, self.total),)

    @property
    def bad_terms(self) -> tuple[SignedSelector, ...]:
        return (SignedSelector(1, self.bad),)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Bounded:
    """Observations of a histogram that are good if at most, or above, one of its bucket bounds."""

    histogram: Metric
    match: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    at_most: float | None = None
    above: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless exactly one bound is given."""
        if (self.at_most is None) == (self.above is None):
            raise ValueError("give either at_most or above")

    @property
    def total_terms(self) -> tuple[SignedSelector, ...]:
        return (SignedSelector(1, Selector(metric=f"{self.histogram}_count", match=self.match)),)

    @property
    def bad_terms(self) -> tuple[SignedSelector, ...]:
        """Observations on the wrong side of the bound."""
        border = self.above if self.at_most is None else self.at_most
        below = Selector(metric=f"{self.histogram}_bucket", match={**self.match, "le": (floatToGoString(border),)})  # type: ignore[no-untyped-call]
        return (SignedSelector(1, below),) if self.at_most is None else (*self.total_terms, SignedSelector(-1, below))


def _kind_of(sli: Any) -> str:
    """Return the kind of an SLI, so that errors name only the fields of that kind."""
    return "bounded" if isinstance(sli, Bounded) or (isinstance(sli, dict) and "histogram" in sli) else "ratio"


Sli = Annotated[Annotated[Ratio, Tag("ratio")] | Annotated[Bounded, Tag("bounded")], Discriminator(_kind_of)]


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Objective:
    """One objective: at least the fraction `target` of the events that `sli` counts is good.

    `alert` names the alert and its runbook page.
    """

    name: Name
    title: str
    target: Annotated[float, Field(gt=0, lt=1)]
    alert: AlertName
    sli: Sli

    @property
    def budget(self) -> float:
        """The error budget: the fraction that may be bad."""
        return round(1 - self.target, 9)


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Rung:
    """Alert when the budget burns `burn` times too fast over both windows."""

    burn: Annotated[float, Field(gt=0)]
    long: Duration
    short: Duration
    severity: Severity


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Onset:
    """Alert at once when at least `min_bad` bad events burn the budget `burn` times too fast in one short window."""

    burn: Annotated[float, Field(gt=0)]
    window: Duration
    min_bad: Annotated[int, Field(ge=1)]
    severity: Severity


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Objectives:
    """The whole file. `window_days` is the budget's window; `runbooks` is the prefix of the alerts' links."""

    window_days: Annotated[int, Field(ge=1)]
    runbooks: str
    ladder: Annotated[tuple[Rung, ...], Field(min_length=1)]
    onset: Onset
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1)]

    def __post_init__(self) -> None:
        """Raise ValueError for duplicate names, budgets too wide for the alerts, and short windows not below long."""
        steepest = max(self.onset.burn, *(rung.burn for rung in self.ladder))
        for objective in self.objectives:
            if objective.budget * steepest >= 1:
                raise ValueError(f"{objective.name} can never burn {steepest:g} times too fast: raise its target")
        names = [objective.name for objective in self.objectives]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two objectives are named {name}")
        for rung in self.ladder:
            if seconds_of(rung.short) >= seconds_of(rung.long):
                raise ValueError(
                    f"the rung of burn {rung.burn:g} has a short window of {rung.short} in one of {rung.long}"
                )


@dataclass(frozen=True, slots=True)
class Tally:
    """Bad events out of all events so far."""

    bad: float
    total: float

    @property
    def good_share(self) -> float | None:
        """The good fraction (0 to 1); None without events."""
        return 1 - self.bad / self.total if self.total > 0 else None


def tally(objective: Objective, sum_of: Callable[[Selector], float]) -> Tally:
    """Count an objective; `sum_of` returns the sum over a selector's series."""
    return Tally(
        bad=sum(term.sign * sum_of(term.selector) for term in objective.sli.bad_terms),
        total=sum(term.sign * sum_of(term.selector) for term in objective.sli.total_terms),
    )


def seconds_of(duration: str) -> int:
    """Return the seconds of a duration such as 5m."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


def load_objectives(path: Path = OBJECTIVES_PATH) -> Objectives:
    """Read the objectives. Raises ConfigError naming the file, the field and the fault."""
    try:
        fields = yaml.safe_load(path.read_text())
        objectives: Objectives = TypeAdapter(Objectives).validate_python(fields)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_of(error)}") from error
    return objectives


def _first_of(error: ValidationError) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"]) or "the file"
    return f"{path}: {first['msg']}"
