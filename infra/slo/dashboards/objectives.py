"""The dashboard of the objectives: one row each, with the good share, the burn rate over the alerts' windows, and the budget."""

from infra.slo.dashboards.board import Board, Panel, Query, Row
from infra.slo.rules import BAD, BUDGET_LEFT, TOTAL, burn_metric
from services.observability.objectives import Objective, Objectives


def board(promised: Objectives) -> Board:
    """Return the dashboard of these objectives."""
    return Board(
        name="objectives",
        title="objectives",
        help="The objectives of infra/prometheus/objectives.yaml and how well they are met.",
        rows=tuple(_row(one, promised) for one in promised.objectives),
    )


def _row(one: Objective, promised: Objectives) -> Row:
    chosen = f'{{slo="{one.name}"}}'
    windows = dict.fromkeys((promised.onset.window, *(rung.long for rung in promised.ladder)))
    return Row(
        f"{one.title}: {one.target * 100:g} %",
        (
            Panel(
                title="Good share over 5 minutes",
                queries=(Query(f"1 - {BAD}{chosen} / ({TOTAL}{chosen} > 0)", "good"),),
                unit="percentunit",
                bad_below=one.target,
            ),
            Panel(
                title="Burn rate",
                queries=tuple(Query(burn_metric(window) + chosen, window) for window in windows),
                bad_from=min(rung.burn for rung in promised.ladder),
                help="1 spends the whole budget in the window of the objective; 14.4 spends a month's budget in two days.",
            ),
            Panel(
                title=f"Budget left of {promised.window_days} days",
                queries=(Query(BUDGET_LEFT + chosen, "left"),),
                unit="percentunit",
                kind="stat",
                bad_below=0.0,
            ),
        ),
    )
