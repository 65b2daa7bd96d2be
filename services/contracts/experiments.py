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
from typing import Any

from services.contracts.recommend import MAX_DEADLINE_MS, Tier
from services.contracts.toml_file import entries_of, read_toml_text, refuse_unknown, table_at
from services.errors import ConfigError

_PLACES = 2**53
_OVERRIDES = ("name", "rules", "deadline_ms", "tiers")
_FORBIDDEN = "=,"
"""Separators of the impression's variant field, so names must not contain them."""
_EXAMPLE = "[experiments.fresher]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Changes by a variant to its surface: model name, rules, deadline, allowed tiers. None: unchanged."""

    weight: float = 1.0
    name: str | None = None
    rules: str | None = None
    deadline_ms: int | None = None
    tiers: tuple[Tier, ...] | None = None

    @property
    def changes(self) -> frozenset[str]:
        """The fields that it sets."""
        return frozenset(one for one in _OVERRIDES if getattr(self, one) is not None)


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
        """Return whether it runs at this time."""
        return self.starts_ms <= now_ms and (self.ends_ms is None or now_ms < self.ends_ms)

    def variant_of(self, user_id: str) -> str | None:
        """Return the user's variant regardless of dates; None if the user is outside the experiment."""
        if user_id in self.exclude_users or not self.start <= place_of(self.salt, user_id) < self.start + self.share:
            return None
        return min(self.variants, key=lambda one: self._draw(one, user_id))

    def _draw(self, variant: str, user_id: str) -> float:
        """Return an exponential variable with the variant's weight as its rate.

        Each variant has the minimum with a probability in proportion to its weight.
        """
        place = place_of(f"{self.salt}/{self.name}/{variant}", user_id)
        return -math.log(place + 0.5 / _PLACES) / self.variants[variant].weight

    @property
    def shares(self) -> dict[str, float]:
        """By variant, its fraction of the experiment's users."""
        whole = sum(one.weight for one in self.variants.values())
        return {name: one.weight / whole for name, one in self.variants.items()}


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
        found = (
            (one, one.variant_of(unit_id))
            for one in self.by_name.values()
            if surface in one.surfaces and one.is_running(now_ms)
        )
        return tuple(
            Assignment(one.name, variant, one.variants[variant]) for one, variant in found if variant is not None
        )


def place_of(salt: str, user_id: str) -> float:
    """Return the user's position in [0, 1): the same in every process and on every machine."""
    digest = hashlib.blake2b(f"{salt}\0{user_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") % _PLACES) / _PLACES


def variant_field(assignments: Sequence[Assignment]) -> str | None:
    """Return the variant field of an impression, such as `fresher=fresh,layout=control`; None without variants."""
    return ",".join(sorted(f"{one.experiment}={one.variant}" for one in assignments)) or None


def variant_in(recorded: str | None, experiment: str) -> str | None:
    """Return the variant of one experiment from an impression's variant field."""
    return dict(part.split("=", 1) for part in (recorded or "").split(",") if "=" in part).get(experiment)


def read_experiments(path: Path) -> Experiments:
    """Read the file. Raises ConfigError naming the entry and the allowed values."""
    return parse_experiments(read_toml_text(path, "experiments"), path.name)


def parse_experiments(text: str, file: str = "experiments.toml") -> Experiments:
    """Return the experiments of this text. Raises ConfigError naming the entry and the allowed values."""
    entries = entries_of(text, file, ("layers", "experiments"))
    salts = _salts(file, entries)
    table = table_at(f"{file}: experiments", entries.get("experiments", {}), _EXAMPLE)
    found = {name: _experiment(f"{file}: experiments.{name}", name, one, salts) for name, one in table.items()}
    for one, other in combinations(found.values(), 2):
        _refuse_disturbance(file, one, other)
    return Experiments(found)


def _salts(file: str, entries: Mapping[str, Any]) -> dict[str, str]:
    salts: dict[str, str] = {}
    for name, entry in table_at(f"{file}: layers", entries.get("layers", {}), _EXAMPLE).items():
        where = f"{file}: layers.{name}"
        fields = table_at(where, entry, _EXAMPLE)
        refuse_unknown(where, fields, ("salt",))
        salt = _text(f"{where}.salt", fields.get("salt"))
        if salt in salts.values():
            raise ConfigError(
                f"{where}.salt: {salt!r} is another layer's, so both would divide the users alike; give one of its own"
            )
        salts[name] = salt
    return salts


def _experiment(where: str, name: str, entry: Any, salts: Mapping[str, str]) -> Experiment:
    fields = table_at(where, entry, _EXAMPLE)
    refuse_unknown(where, fields, ("layer", "surfaces", "from", "share", "starts", "ends", "exclude_users", "variants"))
    _check_name(where, name)
    layer = str(fields.get("layer"))
    if layer not in salts:
        raise ConfigError(f"{where}.layer: {layer!r} is no layer; give one of {', '.join(salts) or '[layers]'}")
    start, share = (
        _number(f"{where}.{key}", fields.get(key, default)) for key, default in (("from", 0.0), ("share", None))
    )
    if not (start >= 0 < share and start + share <= 1 + 1e-9):
        raise ConfigError(f"{where}.share: {start:g} + {share:g} leaves the layer; from and share lie within 0 to 1")
    variants = {
        key: _variant(f"{where}.variants.{key}", key, one)
        for key, one in table_at(f"{where}.variants", fields.get("variants", {}), _EXAMPLE).items()
    }
    if len(variants) < 2:
        raise ConfigError(f"{where}.variants: {len(variants)} is too few to compare; give two or more")
    starts, ends = (_time(f"{where}.{key}", fields.get(key)) for key in ("starts", "ends"))
    if ends is not None and ends <= (starts or 0):
        raise ConfigError(f"{where}.ends: is not after starts; give a later time")
    return Experiment(
        name=name,
        salt=salts[layer],
        layer=layer,
        surfaces=frozenset(_texts(f"{where}.surfaces", fields.get("surfaces"))),
        start=start,
        share=share,
        variants=variants,
        starts_ms=starts or 0,
        ends_ms=ends,
        exclude_users=frozenset(_texts(f"{where}.exclude_users", fields.get("exclude_users", []), least=0)),
    )


def _variant(where: str, key: str, entry: Any) -> Variant:
    _check_name(where, key)
    fields = table_at(where, entry, _EXAMPLE)
    refuse_unknown(where, fields, ("weight", *_OVERRIDES))
    weight = _number(f"{where}.weight", fields.get("weight", 1.0))
    if weight <= 0:
        raise ConfigError(f"{where}.weight: {weight:g} draws no user; give above 0, or leave the variant out")
    deadline_ms, tiers = fields.get("deadline_ms"), fields.get("tiers")
    if deadline_ms is not None and (type(deadline_ms) is not int or not 1 <= deadline_ms <= MAX_DEADLINE_MS):
        raise ConfigError(f"{where}.deadline_ms: {deadline_ms!r} is no deadline; give 1 to {MAX_DEADLINE_MS}")
    if tiers is not None and (unknown := set(_texts(f"{where}.tiers", tiers)) - set(Tier)):
        raise ConfigError(f"{where}.tiers: {', '.join(sorted(unknown))} is unknown; the tiers are {', '.join(Tier)}")
    return Variant(
        weight=weight,
        deadline_ms=deadline_ms,
        tiers=None if tiers is None else tuple(Tier(one) for one in tiers),
        **{one: _text(f"{where}.{one}", fields[one]) for one in ("name", "rules") if one in fields},
    )


def _refuse_disturbance(file: str, one: Experiment, other: Experiment) -> None:
    """Refuse concurrent experiments that share users of one layer, or set one field of a surface from two layers."""
    first, second = one.ends_ms or math.inf, other.ends_ms or math.inf
    surfaces = sorted(one.surfaces & other.surfaces)
    if first <= other.starts_ms or second <= one.starts_ms:
        return
    where = f"{file}: experiments.{other.name}"
    if one.layer == other.layer:
        if other.start < one.start + one.share - 1e-9 and one.start < other.start + other.share - 1e-9:
            raise ConfigError(f"{where}.from: overlaps {one.name} in layer {one.layer}; give a part that is free")
        return
    changed = [frozenset().union(*(variant.changes for variant in each.variants.values())) for each in (one, other)]
    if surfaces and (both := sorted(changed[0] & changed[1])):
        raise ConfigError(
            f"{where}: sets {both[0]} of {surfaces[0]}, as {one.name} does in layer {one.layer}; put both into "
            f"one layer, which has each user in one of them"
        )


def _check_name(where: str, name: str) -> None:
    if not name or any(one in name for one in _FORBIDDEN) or not name.isprintable():
        raise ConfigError(f"{where}: the name must be printable and without {' and '.join(_FORBIDDEN)}")


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {value!r} is no text; give for example 'home'")
    return value


def _texts(where: str, value: Any, least: int = 1) -> list[str]:
    if not isinstance(value, list) or len(value) < least:
        raise ConfigError(f"{where}: {value!r} is no list of {least} or more; give for example ['home']")
    return [_text(where, one) for one in value]


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {value!r} is no number; give for example 0.5")
    return float(value)


def _time(where: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ConfigError(f"{where}: {value!r} is no time with its zone; write for example 2026-11-01T00:00:00Z")
    return int(value.timestamp() * 1_000)
