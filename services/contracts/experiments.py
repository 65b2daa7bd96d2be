"""Experiments: which users see which variant of a surface, read from `experiments.toml`.

    [layers.ranking]
    salt = "ranking-1"

    [experiments.fresher]
    layer = "ranking"
    surfaces = ["home"]
    from = 0.0                          # start of the experiment's range in [0, 1) of the layer's users
    share = 0.2                         # length of that range
    starts = 2026-11-01T00:00:00Z
    ends = 2026-12-01T00:00:00Z
    exclude_users = ["qa-1"]

    [experiments.fresher.variants.control]
    [experiments.fresher.variants.fresh]
    weight = 1.0
    rules = "home-fresh"
    deadline_ms = 80
    tiers = ["student", "popular"]
    name = "default"

A layer's salted hash maps the user id to [0, 1), and an experiment has a range of its layer: in one layer a user is in
at most one experiment, and layers divide the users independently. Growing an experiment's share adds users and moves
none. Variants are assigned by weighted rendezvous hashing (Thaler and Ravishankar 1998; weights: Schindler 2005):
growing a variant's weight moves users only into that variant.

Decisions are pure; only `read_experiments` reads a file.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import combinations
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from services.contracts.message import Id, InvalidField, Message, check_id
from services.contracts.recommend import DeadlineMs, Tier
from services.contracts.toml_file import parse_toml, read_toml

_PLACES = 2**53
_OVERRIDES = ("name", "rules", "deadline_ms", "tiers")
_FORBIDDEN = "=,"
"""Separators of the impression's variant field, so names must not contain them."""
_ROUNDING = 1e-9
_Time = Annotated[datetime, Meta(tz=True)]


class Variant(Message, frozen=True, kw_only=True):
    """Changes by a variant to its surface: model name, rules, deadline, allowed tiers. None: unchanged."""

    weight: Annotated[float, Meta(gt=0)] = 1.0
    name: Id | None = None
    rules: Id | None = None
    deadline_ms: DeadlineMs | None = None
    tiers: Annotated[tuple[Tier, ...], Meta(min_length=1)] | None = None

    @property
    def changes(self) -> frozenset[str]:
        return frozenset(name for name in _OVERRIDES if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment.

    `start` and `share` are its range of the layer; it runs from `starts_ms` (Unix) to before `ends_ms`.
    """

    name: str
    salt: str
    layer: str
    surfaces: frozenset[str]
    start: float
    share: float
    variants: Mapping[str, Variant]
    starts_ms: int = 0
    ends_ms: int | None = None
    exclude_users: frozenset[str] = frozenset()

    def is_running(self, now_ms: int) -> bool:
        return self.starts_ms <= now_ms and (self.ends_ms is None or now_ms < self.ends_ms)

    def variant_of(self, user_id: str) -> str | None:
        """Return the user's variant regardless of dates; None if the user is outside the experiment."""
        if user_id in self.exclude_users or not self.start <= place_of(self.salt, user_id) < self.start + self.share:
            return None
        return min(self.variants, key=lambda variant: self._draw(variant, user_id))

    def _draw(self, variant: str, user_id: str) -> float:
        """Return an exponential variable with the variant's weight as its rate.

        Each variant has the minimum with a probability in proportion to its weight.
        """
        position = place_of(f"{self.salt}/{self.name}/{variant}", user_id)
        return -math.log(position + 0.5 / _PLACES) / self.variants[variant].weight

    @property
    def shares(self) -> dict[str, float]:
        """By variant, its fraction of the experiment's users."""
        whole = sum(variant.weight for variant in self.variants.values())
        return {name: variant.weight / whole for name, variant in self.variants.items()}


@dataclass(frozen=True, slots=True)
class Assignment:
    """A user's variant of one experiment."""

    experiment: str
    variant: str
    settings: Variant


@dataclass(frozen=True, slots=True)
class Experiments:
    """All experiments of a file by name, in file order."""

    by_name: Mapping[str, Experiment] = field(default_factory=dict)

    def assign(self, surface: str, unit_id: str, now_ms: int) -> tuple[Assignment, ...]:
        """Return the assignments of this user (or visitor's session) on a surface: at most one variant per layer."""
        drawn = (
            (experiment, experiment.variant_of(unit_id))
            for experiment in self.by_name.values()
            if surface in experiment.surfaces and experiment.is_running(now_ms)
        )
        return tuple(
            Assignment(experiment.name, variant, experiment.variants[variant])
            for experiment, variant in drawn
            if variant is not None
        )


def place_of(salt: str, user_id: str) -> float:
    """Return the user's position in [0, 1): the same in every process and on every machine."""
    digest = hashlib.blake2b(f"{salt}\0{user_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") % _PLACES) / _PLACES


def variant_field(assignments: Sequence[Assignment]) -> str | None:
    """Return the variant field of an impression, such as `fresher=fresh,layout=control`; None without variants."""
    return ",".join(sorted(f"{assignment.experiment}={assignment.variant}" for assignment in assignments)) or None


def variant_in(recorded: str | None, experiment: str) -> str | None:
    """Return the variant of one experiment from an impression's variant field."""
    return dict(part.split("=", 1) for part in (recorded or "").split(",") if "=" in part).get(experiment)


class _Layer(Message, frozen=True):
    salt: Id


class _Entry(Message, frozen=True, kw_only=True):
    layer: Id
    surfaces: Annotated[tuple[Id, ...], Meta(min_length=1)]
    start: Annotated[float, Meta(ge=0, le=1)] = msgspec.field(default=0.0, name="from")
    share: Annotated[float, Meta(gt=0, le=1)]
    starts: _Time | None = None
    ends: _Time | None = None
    exclude_users: tuple[Id, ...] = ()
    variants: Annotated[dict[str, Variant], Meta(min_length=2)]

    def __post_init__(self) -> None:
        """Check that the fields fit together. Raises InvalidField."""
        super().__post_init__()
        if self.start + self.share > 1 + _ROUNDING:
            problem = f"from {self.start:g} + {self.share:g} is more than 1"
            raise InvalidField("share", problem, "send from and share within 0 to 1")
        if self.ends is not None and self.starts is not None and self.ends <= self.starts:
            raise InvalidField("ends", "not after starts", "send a later time")
        for name in self.variants:
            _check_name(f"variants.{name}", name)


class _File(Message, frozen=True):
    layers: dict[str, _Layer] = msgspec.field(default_factory=dict)
    experiments: dict[str, _Entry] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check names, layers, and that no two experiments disturb each other. Raises InvalidField."""
        salts: set[str] = set()
        for name, layer in self.layers.items():
            if layer.salt in salts:
                raise InvalidField(
                    f"layers.{name}.salt", "also another layer's, which divides users alike", "change it"
                )
            salts.add(layer.salt)
        for name, entry in self.experiments.items():
            _check_name(f"experiments.{name}", name)
            if entry.layer not in self.layers:
                fix = f"send one of {', '.join(self.layers) or '[layers]'}"
                raise InvalidField(f"experiments.{name}.layer", f"unknown layer {entry.layer!r}", fix)
        for (name, entry), (other_name, other) in combinations(self.experiments.items(), 2):
            _refuse_disturbance(name, entry, f"experiments.{other_name}", other)


def read_experiments(path: Path, source: str = "TAILRACE_EXPERIMENTS_FILE") -> Experiments:
    """Read the file that the setting or option `source` names. Raises ConfigError naming source and entry."""
    return _experiments(read_toml(_File, path, source))


def parse_experiments(text: str) -> Experiments:
    """Return the experiments of this text. Raises ConfigError naming the entry."""
    return _experiments(parse_toml(_File, text, "experiments.toml"))


def _experiments(file: _File) -> Experiments:
    return Experiments(
        {
            name: Experiment(
                name=name,
                salt=file.layers[entry.layer].salt,
                layer=entry.layer,
                surfaces=frozenset(entry.surfaces),
                start=entry.start,
                share=entry.share,
                variants=entry.variants,
                starts_ms=0 if entry.starts is None else _ms(entry.starts),
                ends_ms=None if entry.ends is None else _ms(entry.ends),
                exclude_users=frozenset(entry.exclude_users),
            )
            for name, entry in file.experiments.items()
        }
    )


def _refuse_disturbance(name: str, entry: _Entry, other_path: str, other: _Entry) -> None:
    """Refuse concurrent experiments that share users of one layer, or set one field of a surface from two layers."""
    if not (_begins_before_end_of(entry, other) and _begins_before_end_of(other, entry)):
        return
    if entry.layer == other.layer:
        if other.start < entry.start + entry.share - _ROUNDING and entry.start < other.start + other.share - _ROUNDING:
            problem = f"overlaps {name} in layer {entry.layer}"
            raise InvalidField(f"{other_path}.from", problem, "send a part of the layer that is free")
        return
    surfaces = sorted({*entry.surfaces} & {*other.surfaces})
    changed = [
        frozenset().union(*(variant.changes for variant in experiment.variants.values()))
        for experiment in (entry, other)
    ]
    if surfaces and (both := sorted(changed[0] & changed[1])):
        problem = f"sets {both[0]} of {surfaces[0]}, as {name} does in layer {entry.layer}"
        raise InvalidField(other_path, problem, "put both into one layer, which has each user in one of them")


def _begins_before_end_of(entry: _Entry, other: _Entry) -> bool:
    return entry.starts is None or other.ends is None or entry.starts < other.ends


def _check_name(path: str, name: str) -> None:
    check_id(path, name)
    if any(character in name for character in _FORBIDDEN):
        raise InvalidField(path, f"has {' or '.join(_FORBIDDEN)}", "choose a name without them")


def _ms(time: datetime) -> int:
    return int(time.timestamp() * 1_000)
