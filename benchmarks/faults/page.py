"""The fault matrix as Markdown tables for a page."""

from collections.abc import Sequence
from typing import Any

_HEAD = "| fault | answered | in time | p99 ms | goodput | recovered after | answered by, while it lasts |"


def matrix(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table; goodput 1.000 means that the LLM answered every request in time."""
    return "\n".join([_HEAD, "|---|---|---|---|---|---|---|", *map(_line, rows)])


def priorities(row: dict[str, Any]) -> str:
    """Return one row by priority, and high priority also by door."""
    lines = [
        f"| {name} | {one['num_requests']} | {_percent(one['availability'])} | {_percent(one['deadline_met'])}"
        f" | {one['p99_ms']:.1f} | {_mix(one)} |"
        for name, one in (row["by_priority"] | row["by_door"]).items()
    ]
    head = "| callers | requests | answered | in time | p99 ms | answered by |"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines])


def _line(row: dict[str, Any]) -> str:
    recovery = "not in this row" if row["recovery_s"] is None else f"{row['recovery_s']:.1f} s"
    return (
        f"| {row['fault']} | {_percent(row['availability'])} | {_percent(row['deadline_met'])} | {row['p99_ms']:.1f}"
        f" | {row['goodput']:.3f} | {recovery} | {_mix(row['during'])} |"
    )


def _mix(part: dict[str, Any]) -> str:
    named = {"failed" if tier == "none" else tier: share for tier, share in part["tiers"].items() if share >= 0.005}
    return ", ".join(f"{tier} {share:.0%}" for tier, share in sorted(named.items(), key=lambda one: -one[1]))


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
