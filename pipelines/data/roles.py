"""Roles, counts and repeat fraction of a whole event table, and findings as sentences. Pure."""

import re
from collections.abc import Callable

import polars as pl

from services.contracts.event_roles import HISTORY_ROLES, EventRoles, Role, TypeRule


def role_of(roles: EventRoles) -> pl.Expr:
    return _by_type(roles, _role)


def with_labels(events: pl.DataFrame, roles: EventRoles) -> pl.DataFrame:
    """Add `role`, `weight` (the training weight, 0: not trained on) and `count` (for popularity and similar items).

    A user's final dislike of an item, by a negative event that no positive event follows, removes the user's counts for
    it: it is not a label and adds nothing to popularity. Negative events count 0 here; `dislikes_of` has them. `events`
    are in order of time.
    """
    weight, count = (_by_type(roles, of) for of in (_weight, _count))
    labelled = events.with_columns(role=role_of(roles), weight=weight, count=count)
    final = pl.col("role").filter(_decides()).last().over("user_id", "item_id")
    is_taken_back = (final == Role.NEGATIVE.value).fill_null(value=False)
    return labelled.with_columns(
        pl.when(is_taken_back | ~joins_history()).then(0.0).otherwise(pl.col(name)).cast(pl.Float32).alias(name)
        for name in ("weight", "count")
    )


def dislikes_of(events: pl.DataFrame, roles: EventRoles) -> pl.DataFrame:
    """Return the dislikes (user_id, item_id, event_time, weight, until) of events in order of time.

    A user's dislike of an item counts once: from its first negative event until the next positive event takes it back
    (null without one). Dislikes of weight 0 are skipped.
    """
    deciding = events.with_columns(role=role_of(roles), weight=_by_type(roles, _weight)).filter(_decides())
    is_negative, pair = pl.col("role") == Role.NEGATIVE.value, ("user_id", "item_id")
    taken_back = pl.when(~is_negative).then("event_time").backward_fill().over(pair)
    is_first = (is_negative.shift(1).over(pair) != is_negative).fill_null(value=True)
    return (
        deciding.with_columns(until=taken_back, is_first=is_first)
        .filter(is_negative & pl.col("is_first") & (pl.col("weight") > 0))
        .select("user_id", "item_id", "event_time", pl.col("weight").cast(pl.Float32), "until")
    )


def repeat_share(events: pl.DataFrame) -> float:
    """Return the fraction of positive events, excluding each user's first event, whose item is already in the history.

    It is 0 without such events.
    """
    placed = events.with_columns(
        has_history=pl.int_range(pl.len()).over("user_id") > 0,
        is_repeat=~pl.struct("user_id", "item_id").is_first_distinct(),
    )
    labels = placed.filter(pl.col("has_history") & (pl.col("role") == Role.POSITIVE))
    return float(labels["is_repeat"].sum() / max(1, labels.height))


def describe(events: pl.DataFrame, roles: EventRoles) -> list[str]:
    """Return a sentence for each event type: its number of events by role."""
    counted = events.with_columns(role=role_of(roles)).group_by("event_type", "role").len().sort("event_type", "role")
    parts_by_type: dict[str, list[str]] = {}
    for event_type, role, count in counted.iter_rows():
        parts_by_type.setdefault(event_type, []).append(f"{count} {role}")
    return [
        f"events of type {name}: {', '.join(parts)}{_rule(roles.rule(name))}" for name, parts in parts_by_type.items()
    ]


def describe_alike(events: pl.DataFrame, roles: EventRoles) -> list[str]:
    """Return a sentence for each group of types, in events and rules, that differ only in case or punctuation."""
    counts = dict(events["event_type"].value_counts().iter_rows())
    groups: dict[str, list[str]] = {}
    for name in sorted({*counts, *roles.rules}):
        groups.setdefault(re.sub(r"[\W_]", "", name.casefold()) or name, []).append(name)
    alike = [names for names in groups.values() if len(names) > 1 and counts.keys() & set(names)]
    return [
        f"types {' and '.join(f'{name!r} ({counts.get(name, 0)} {roles.rule(name).role})' for name in names)} "
        "differ only in case or punctuation and count as different types; write one of them in the table, or give "
        "each a rule in the events file"
        for names in alike
    ]


def _rule(rule: TypeRule) -> str:
    return "" if rule.min_value is None else f" ({rule.min_value:g} and up are {rule.role}, lower ones {rule.below})"


def _by_type(roles: EventRoles, of: Callable[[TypeRule], pl.Expr]) -> pl.Expr:
    chosen = of(roles.other)
    for name, rule in roles.rules.items():
        chosen = pl.when(pl.col("event_type") == name).then(of(rule)).otherwise(chosen)
    return chosen


def _role(rule: TypeRule) -> pl.Expr:
    return _at_value(rule, pl.lit(rule.role.value), pl.lit(rule.below.value))


def _weight(rule: TypeRule) -> pl.Expr:
    return _at_value(rule, pl.lit(rule.weight_of(rule.role)), pl.lit(rule.weight_of(rule.below)))


def _count(rule: TypeRule) -> pl.Expr:
    return _at_value(rule, pl.lit(rule.count_of(rule.role)), pl.lit(rule.count_of(rule.below)))


def _at_value(rule: TypeRule, from_it_on: pl.Expr, below: pl.Expr) -> pl.Expr:
    if rule.min_value is None:
        return from_it_on
    return pl.when(pl.col("value") >= rule.min_value).then(from_it_on).otherwise(below)


def _decides() -> pl.Expr:
    """Whether the row's `role` decides if the user dislikes the item."""
    return pl.col("role").is_in([Role.POSITIVE.value, Role.NEGATIVE.value])


def joins_history() -> pl.Expr:
    """Whether histories hold rows of this `role`."""
    return pl.col("role").is_in([role.value for role in HISTORY_ROLES])
