"""Blocks: items that match any of the clauses are not shown.

Blocks are merged into the filters before ranking: no beam is spent on a blocked item, no tier's list comes up short
because of it, and no later rule sees it.
"""

from services.contracts.filters import Expression
from services.contracts.rules import Rules


def without_blocked(rules: Rules) -> Expression | None:
    """Return the expression that matches items that are not blocked; None without blocks."""
    return Expression.of(must_not=rules.blocks) if rules.blocks else None
