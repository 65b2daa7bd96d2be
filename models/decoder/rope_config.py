"""Rotary positions of a checkpoint, read from the keys of a `config.json`. Pure.

Newer files keep all keys under `rope_parameters`; older files keep the scaling under `rope_scaling` and the base at the
top level. Both places must agree, and an unknown key is rejected: it would change every position.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.decoder.config_values import Raw, number, positive

RopeKind = Literal["linear", "llama3", "yarn"]

_KINDS: dict[str, RopeKind] = {"linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_TRAINED = "original_max_position_embeddings"
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "default": (_TRAINED,),
    "linear": (_TRAINED,),
    "llama3": (_TRAINED,),
    "yarn": (_TRAINED, "beta_fast", "beta_slow", "attention_factor", "finetuned"),
}
_OFF: Mapping[str, Any] = {"partial_rotary_factor": 1.0, "truncate": True}
"""Keys of every kind, with the only supported value."""
_PLACES = ("rope_theta", "rope_scaling", "rope_parameters", "rope_interleaved")
"""Rope keys at the top level that are read here or checked by the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The lengthening of rope periods by up to `factor`.

    `original_positions` is the trained length. llama3 keeps pairs that rotate more than `high_freq_factor` times within
    it and fully lengthens pairs that rotate less than `low_freq_factor` times; YaRN uses `beta_fast` and `beta_slow`
    rotations instead, and multiplies cosine and sine by `attention_factor`.
    """

    kind: RopeKind
    factor: float
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary positions of a checkpoint: the base of the periods, and their scaling, if any."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None


def read_rope(raw: Raw, max_positions: int) -> Rope:
    """Return the base and the scaling. Raises ValueError or KeyError naming the conflicting, unknown or missing key."""
    given = _parameters(raw)
    kind = given.pop("rope_type")
    if kind not in _REQUIRED:
        raise ValueError(f"rope_type {kind!r} is not supported, only {' or '.join(map(repr, _REQUIRED))}")
    theta = positive(given, "rope_theta", 10_000.0)
    _check_keys(given, kind)
    if kind == "default":
        return Rope(theta)
    trained = int(positive(given, _TRAINED, max_positions))
    options = {name: number(given, name) for name in _scaling_options(kind) if name in given}
    if kind == "yarn":
        options.setdefault("attention_factor", yarn_attention_factor(positive(given, "factor")))
    scaling = RopeScaling(kind=_KINDS[kind], factor=positive(given, "factor"), original_positions=trained, **options)
    _refuse_impossible(scaling, theta)
    return Rope(theta, scaling)


def describe_rope(rope: Rope) -> Raw:
    """Return the value of `rope_parameters`."""
    scaling = rope.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": scaling.kind,
        "rope_theta": rope.theta,
        "factor": scaling.factor,
        **({} if scaling.kind == "linear" else {_TRAINED: scaling.original_positions}),
        **{name: getattr(scaling, name) for name in _scaling_options(scaling.kind)},
    }


def yarn_attention_factor(factor: float) -> float:
    """Return YaRN's default attention factor for cosine and sine."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _parameters(raw: Raw) -> Raw:
    """Return the rope keys of all places, including `rope_type`, without nulls.

    Raises ValueError if two places differ.
    """
    _refuse_unknown(raw)
    newer, older = (_named(raw, key) for key in ("rope_parameters", "rope_scaling"))
    if newer and older and _without_theta(newer) != _without_theta(older):
        raise ValueError("rope_parameters and rope_scaling differ; keep one of them")
    beside = {name: raw[name] for name in ("rope_theta", *_OFF, _TRAINED) if raw.get(name) is not None}
    merged: Raw = {"rope_type": "default"}
    for given in (newer, older, beside):
        for name, value in given.items():
            if name != "rope_type" and merged.get(name, value) != value:
                raise ValueError(f"{name} {merged[name]!r:.80} and {name} {value!r:.80} differ; keep one of them")
            merged[name] = value
    return merged


def _refuse_unknown(raw: Raw) -> None:
    """Reject rope keys of other families at the top level, unless they are off."""
    for name, value in raw.items():
        is_off = not value or value == "default" or (value == 1 and value is not True)
        if name.startswith(("rope_", "rotary_")) and name not in _PLACES and not is_off:
            raise ValueError(f"{name} {value!r:.80} is not supported; remove it")


def _named(raw: Raw, key: str) -> Raw:
    """Return the keys of one object under their newer names, without nulls."""
    given = raw.get(key) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{key} {given!r:.80} is not an object")  # noqa: TRY004 - as for any other bad value
    kinds = [given[name] for name in ("rope_type", "type") if given.get(name) is not None]
    if kinds[1:] and kinds[0] != kinds[1]:
        raise ValueError(f"{key}: rope_type {kinds[0]!r:.80} and type {kinds[1]!r:.80} differ; keep one of them")
    kept = {name: value for name, value in given.items() if name not in ("type", "rope_type") and value is not None}
    return kept | ({"rope_type": kinds[0]} if kinds else {})


def _without_theta(given: Raw) -> Raw:
    return {"rope_type": "default"} | {name: value for name, value in given.items() if name != "rope_theta"}


def _check_keys(given: Raw, kind: str) -> None:
    for name in _REQUIRED[kind]:
        if name not in given:
            raise KeyError(name)
    for name, value in given.items():
        if name in _OFF:
            if value != _OFF[name]:
                raise ValueError(f"{name} {value!r:.80} is not supported, only {_OFF[name]!r}")
        elif name != "rope_theta" and name not in _REQUIRED[kind] + _OPTIONAL[kind]:
            raise ValueError(f"rope key {name} is unknown for rope_type {kind!r}; {_fix_for(kind)}")


def _fix_for(kind: str) -> str:
    return "set rope_type to the scaling that it belongs to" if kind == "default" else "remove it"


def _refuse_impossible(scaling: RopeScaling, theta: float) -> None:
    if scaling.kind == "llama3" and not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise ValueError("low_freq_factor must be above 0 and below high_freq_factor")
    if scaling.kind == "yarn" and not (0 < scaling.beta_slow < scaling.beta_fast and theta != 1.0):
        raise ValueError("beta_slow must be above 0 and below beta_fast, and rope_theta not 1")


def _scaling_options(kind: str) -> tuple[str, ...]:
    if kind == "llama3":
        return ("low_freq_factor", "high_freq_factor")
    return ("beta_fast", "beta_slow", "attention_factor") if kind == "yarn" else ()
