"""Blocks: items for which any of the clauses holds are not shown.

They become part of the filters, before anything is ranked: so no beam is spent on a blocked item, no tier's list is short of items for it, and
no later rule sees one.
"""

from services.contracts.filters import Expression
from services.contracts.rules import Rules


def without_blocked(rules: Rules) -> Expression | None:
    """Return the expression that holds for items that are not blocked; None without blocks."""
    return Expression.of(must_not=rules.blocks) if rules.blocks else None
