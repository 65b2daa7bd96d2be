"""The Grafana dashboards as code: panels are values here, and `board` turns them into Grafana's JSON."""

from typing import Any

from infra.slo.dashboards import capacity, engine, models, objectives, overview, stream, text
from infra.slo.dashboards.board import Board, render
from services.observability.objectives import Objectives


def all_boards(promised: Objectives) -> tuple[Board, ...]:
    """Return every dashboard."""
    return (
        overview.BOARD,
        objectives.board(promised),
        engine.BOARD,
        text.BOARD,
        stream.BOARD,
        models.BOARD,
        capacity.BOARD,
    )


def all_dashboards(promised: Objectives) -> dict[str, dict[str, Any]]:
    """Return every dashboard's JSON by its name."""
    return {board.name: render(board) for board in all_boards(promised)}
