"""The masks of the items that a request may show, and the checks of the entries that it names. Pure; numpy only."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from services.contracts.filters import Clause
from services.contracts.recommend import RecommendRequest
from services.contracts.rules import NO_RULES, Rules
from services.errors import InvalidRequest, NotFound
from services.items.expression import Budget, Compiled, Expressions
from services.items.layout import ItemLayout


@dataclass(frozen=True, slots=True)
class Masks:
    """The allowed items, (num_items,) bool: as requested, and with seen items allowed again."""

    allowed: np.ndarray
    allowed_if_seen: np.ndarray
    num_allowed: int
    num_allowed_if_seen: int

    @property
    def showable(self) -> np.ndarray:
        """The items that an answer may contain, (num_items,) bool: as requested, or seen items too if none remain."""
        return self.allowed if self.num_allowed else self.allowed_if_seen

    @property
    def num_showable(self) -> int:
        """Number of items that an answer may contain."""
        return self.num_allowed or self.num_allowed_if_seen


def merge_history(stored: tuple[str, ...], recent: tuple[str, ...]) -> tuple[str, ...]:
    """Append recent items to the stored history (both oldest first), skipping the overlap that is already stored."""
    for overlap in range(min(len(stored), len(recent)), 0, -1):
        if stored[-overlap:] == recent[:overlap]:
            return stored + recent[overlap:]
    return stored + recent


def clauses_of(request: RecommendRequest) -> Iterator[tuple[str, Clause]]:
    """Yield the request's clauses that need a mask, each with its path.

    Excludes blocks, which the surface merges into the filters.
    """
    if request.filters.expression is not None:
        yield "filters", request.filters.expression
    for index, boost in enumerate(request.rules.boosts or ()):
        yield f"rules.boosts[{index}].where", boost.where


def check_items(
    request: RecommendRequest, items: ItemLayout, expressions: Expressions, budget: Budget | None = None
) -> None:
    """Reject filters and rules with unknown categories, items or attributes, or more item tests than `budget` has left.

    Raises InvalidRequest naming the entry, NotFound for a subject.
    """
    check_named(request, items)
    filters, rules = request.filters, request.rules
    budget = budget or Budget()
    blocks = ((f"rules.blocks[{index}]", clause) for index, clause in enumerate(rules.blocks or ()))
    for path, clause in (*clauses_of(request), *blocks):
        budget.spend(clause, path, expressions)
    items.check_filters(filters.categories, filters.allowed_item_ids)
    if filters.expression is not None:
        expressions.check(filters.expression, "filters")
    if rules is NO_RULES:
        return
    check_rules(rules, "rules", expressions)
    for index, pin in enumerate(rules.pins or ()):
        if items.index(pin.item_id) is None:
            fix = "name an item of the catalogue"
            raise InvalidRequest(f"rules.pins[{index}].item_id", f"unknown item {pin.item_id!r}", fix)


def check_rules(rules: Rules, path: str, expressions: Expressions) -> None:
    """Reject rules that name unknown attributes. Raises InvalidRequest naming the entry."""
    for index, boost in enumerate(rules.boosts or ()):
        expressions.check(boost.where, f"{path}.boosts[{index}].where")
    for index, clause in enumerate(rules.blocks or ()):
        expressions.check(clause, f"{path}.blocks[{index}]")
    for index, cap in enumerate(rules.caps or ()):
        expressions.check_attribute(cap.attribute, f"{path}.caps[{index}].attribute")


def masks_for(
    request: RecommendRequest,
    history: Iterable[str],
    items: ItemLayout,
    disliked: tuple[str, ...] = (),
    expressions: Compiled | None = None,
    unwished: np.ndarray | None = None,
) -> Masks:
    """Compute the masks from the live catalogue, filters, exclusions, dislikes and history.

    Hidden, excluded and disliked items are in neither mask. Items of earlier pages are in neither mask too and do not
    bring seen items back: later pages end where the first page would have ended. `expressions` holds the mask of the
    filter expression, if any. `unwished` (n,) bool are the items by index that a wish excludes.
    """
    seen = items.indices(history) if request.exclude_seen else []
    wide = items.allowed(
        categories=request.filters.categories,
        allowed_item_ids=request.filters.allowed_item_ids,
        excluded_item_ids=request.exclude_item_ids + request.subject_item_ids + disliked,
    )
    if (expression := request.filters.expression) is not None and expressions is not None:
        wide &= expressions.mask(expression)[
            : len(wide)
        ]  # computed after the other mask, so it covers all of its items
    if unwished is not None:
        wide[: len(unwished)] &= ~unwished[: len(wide)]
    narrow = _without(wide, seen) if request.exclude_seen else wide
    if request.shown_before:
        before, is_all_seen = items.indices(request.shown_before), not narrow.any()
        narrow = _without(narrow, before)
        wide = _without(wide, before) if is_all_seen else narrow
    num_wide = int(np.count_nonzero(wide))
    return Masks(narrow, wide, num_wide if narrow is wide else int(np.count_nonzero(narrow)), num_wide)


def _without(mask: np.ndarray, indices: list[int]) -> np.ndarray:
    """Return a copy of the mask without these items."""
    left = mask.copy()
    left[indices] = False
    return left


def check_named(request: RecommendRequest, items: ItemLayout) -> None:
    """Reject subject items that are unknown to the bundle and the live catalogue. Raises NotFound naming the first."""
    if unknown := next((item_id for item_id in request.subject_item_ids if not items.has(item_id)), None):
        raise NotFound(f"the live catalogue has no item {unknown!r}", "name items of the catalogue")
