"""The objectives as a table in docs/slos.md, between two marks; the words around it are written by hand."""

from services.observability.objectives import Bounded, Objective, Objectives, Onset

BEGIN, END = "<!-- made by `make slo`: begin -->", "<!-- made by `make slo`: end -->"


def with_table(page: str, objectives: Objectives) -> str:
    """Put the table between the marks of a page. Raises ValueError when the page lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{_table(objectives)}\n{END}{after}"


def _table(objectives: Objectives) -> str:
    days = objectives.window_days
    rows = [
        f"| objective | of all, at least | budget in {days} days | counted as bad | alert |",
        "|---|---|---|---|---|",
        *(_row(one, days) for one in objectives.objectives),
        "",
        "| burns at least | over | and over | then |",
        "|---|---|---|---|",
        _onset_row(objectives.onset),
        *(
            f"| {rung.burn:g} times too fast | {rung.long} | {rung.short} | {rung.severity} |"
            for rung in objectives.ladder
        ),
    ]
    return "\n".join(rows)


def _onset_row(onset: Onset) -> str:
    return f"| {onset.burn:g} times too fast, {onset.min_bad} bad ones | {onset.window} | | {onset.severity} |"


def _row(one: Objective, days: int) -> str:
    minutes = one.budget * days * 24 * 60
    budget = f"{minutes / 60:.1f} h" if minutes >= 120 else f"{minutes:.0f} min"
    return (
        f"| {one.title} (`{one.name}`) | {one.target * 100:g} % | {budget} | {_bad(one)} "
        f"| [{one.alert}](runbooks/{one.alert}.md) |"
    )


def _bad(one: Objective) -> str:
    if isinstance(one.sli, Bounded):
        side = f"above {one.sli.at_most:g}" if one.sli.at_most is not None else f"at most {one.sli.above:g}"
        return f"`{one.sli.histogram}` {side}"
    match = "".join(f", {label} {' or '.join(values)}" for label, values in one.sli.bad.match.items())
    return f"`{one.sli.bad.metric}`{match}"
