"""Writes the terms of an objective as PromQL. Knows no window's purpose and no alert."""

import re

from services.observability.objectives import Objective, Selector, Term

_NO_TRAFFIC = "1e-9"
_PLAIN = re.compile(r"[\w.]+")


def selector(chosen: Selector, span: str | None = None) -> str:
    """Write a selector, with a range when one is given. Raises ValueError for alternatives that are no plain words."""
    matchers = ", ".join(_matcher(label, values) for label, values in chosen.match.items())
    return chosen.metric + (f"{{{matchers}}}" if matchers else "") + (f"[{span}]" if span else "")


def over(terms: tuple[Term, ...], function: str, span: str) -> str:
    """Write the sum of terms, the first of them added, each through rate or increase over a window."""
    signed = [(term.sign, f"sum({function}({selector(term.selector, span)}))") for term in terms]
    return signed[0][1] + "".join(f" {'+' if sign > 0 else '-'} {text}" for sign, text in signed[1:])


def burn_rate(objective: Objective, span: str) -> str:
    """Write how many times too fast the budget burns over a window, to two decimals; 0 without traffic.

    Rounded, so that a burn of exactly 14.4 is 14.4 and not a bit less.
    """
    bad = over(objective.sli.bad_terms, "rate", span)
    total = over(objective.sli.total_terms, "rate", span)
    return f"round(({bad}) / clamp_min({total}, {_NO_TRAFFIC}) / {objective.budget:g}, 0.01)"


def any_absent(objective: Objective) -> str:
    """Write a query that answers when something that the objective is made of does not exist at all.

    Only bucket borders are asked for by label: other series of a metric begin with the first thing that they count.
    """
    terms = (*objective.sli.total_terms, *objective.sli.bad_terms)
    asked = dict.fromkeys(selector(_barely(term.selector)) for term in terms)
    return " or ".join(f"sum(absent({text}))" for text in asked)


def _barely(chosen: Selector) -> Selector:
    return Selector(metric=chosen.metric, match={label: v for label, v in chosen.match.items() if label == "le"})


def _matcher(label: str, values: tuple[str, ...]) -> str:
    if len(values) == 1:
        return f'{label}="{values[0]}"'
    for value in values:
        if not _PLAIN.fullmatch(value):
            raise ValueError(f"{label}: {value!r} would be a pattern")
    return f'{label}=~"{"|".join(values)}"'
