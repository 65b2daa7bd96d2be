"""A surface: a recommendation slot in a product (home, cart, mail), with the settings of requests that name it. Pure.

    [cart]
    k = 6
    deadline_ms = 80
    tiers = ["student", "popular"]
    filter = { must_not = [{ key = "categories", eq = "Gift cards" }] }
    locked = ["caps"]
    explore = { share = 0.05, position = 5, of = 50 }
    [cart.rules]
    caps = [{ attribute = "categories", most = 2 }]

A request's own `k`, deadline and rules override the surface's; its filter is added to the surface's, as are its blocks.
A request may not set a `locked` field. The popular tier is always allowed, so that every request has an answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from models.registry.name_record import DEFAULT_NAME
from services.contracts.experiments import Assignment, variant_field
from services.contracts.filters import Expression, ExpressionBody, all_of, check_size
from services.contracts.message import Id, InvalidField, Message, convert
from services.contracts.nearest import nearest
from services.contracts.recommend import DeadlineMs, Filters, K, RecommendRequest, Tier
from services.contracts.rules import NAMES, NO_RULES, Rules
from services.contracts.tenant import scoped_name, tenant_of_surface
from services.errors import InvalidRequest
from services.gateway.rules.block import without_blocked
from services.gateway.rules.explore import Exploration

LOCKABLE = ("k", "deadline_ms", "filters", *NAMES)


class SurfaceBody(Message, frozen=True, kw_only=True):
    """One surface of the file."""

    model: Id | None = None
    k: K | None = None
    deadline_ms: DeadlineMs | None = None
    filter: ExpressionBody | None = None
    rules: Rules = NO_RULES
    tiers: tuple[Tier, ...] | None = None
    locked: tuple[str, ...] = ()
    explore: Exploration | None = None

    def __post_init__(self) -> None:
        """Check the size of the filter, and the names of locked fields. Raises InvalidField."""
        super().__post_init__()
        if (expression := self.expression) is not None:
            check_size(expression, "filter", level=1)
        for index, name in enumerate(self.locked):
            if name not in LOCKABLE:
                raise InvalidField(f"locked[{index}]", f"unknown {name!r}", nearest(name, LOCKABLE))

    @property
    def expression(self) -> Expression | None:
        """The filter; None without clauses."""
        return None if self.filter is None else self.filter.as_expression()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """The settings of one slot; `name` is None for requests without a surface.

    `model` is the name whose bundles answer; if None, the first served name. `variant` names the experiment variants
    applied.
    """

    name: str | None = None
    model: str | None = None
    k: int | None = None
    deadline_ms: int | None = None
    filter: Expression | None = None
    rules: Rules = NO_RULES
    tiers: frozenset[Tier] = frozenset(Tier)
    locked: frozenset[str] = frozenset()
    explore: Exploration | None = None
    variant: str | None = None

    def varied(self, assigned: Sequence[Assignment], surfaces: Mapping[str, "Surface"]) -> "Surface":
        """Return the surface with the settings of these variants; `surfaces` resolves the rules that they name."""
        changes: dict[str, Any] = {"variant": variant_field(assigned)} if assigned else {}
        for settings in (assignment.settings for assignment in assigned):
            if settings.name is not None:
                changes["model"] = settings.name
            if settings.rules is not None:
                changes["rules"] = surfaces[settings.rules].rules
            if settings.deadline_ms is not None:
                changes["deadline_ms"] = settings.deadline_ms
            if settings.tiers is not None:
                changes["tiers"] = frozenset({*settings.tiers, Tier.POPULAR})
        return replace(self, **changes) if changes else self

    def applied_to(self, request: RecommendRequest) -> RecommendRequest:
        """Return the request with the surface's settings, filter and blocks applied. Raises InvalidRequest."""
        if self.name is None and not request.rules.blocks:
            return request
        self._refuse_locked(request)
        rules = self.rules.overridden_by(request.rules)
        expression = all_of(self.filter, request.filters.expression, without_blocked(rules))
        filters = request.filters
        return msgspec.structs.replace(
            request,
            k=self.k if request.k is None else request.k,
            deadline_ms=self.deadline_ms if request.deadline_ms is None else request.deadline_ms,
            filters=Filters.of(expression, categories=filters.categories, allowed_item_ids=filters.allowed_item_ids),
            rules=rules,
        )

    def _refuse_locked(self, request: RecommendRequest) -> None:
        for name in self.locked:
            is_rule = name in NAMES
            field = f"rules.{name}" if is_rule else name
            sent = getattr(request.rules if is_rule else request, name)
            if sent is not None and (name != "filters" or sent != type(sent)()):
                raise InvalidRequest(field, f"the surface {self.name} allows no other", "leave it out")


NO_SURFACE = Surface()


def default_surface(tenant: str) -> Surface:
    """Return the surface of this tenant's requests without a surface."""
    return Surface(model=scoped_name(tenant, DEFAULT_NAME)) if tenant else NO_SURFACE


def parse_surface(name: str, plain: Any) -> Surface:
    """Read one surface from plain values. Raises InvalidRequest naming the path."""
    sent = convert(SurfaceBody, plain, name)
    return Surface(
        name=name,
        model=sent.model or default_surface(tenant_of_surface(name)).model,
        k=sent.k,
        deadline_ms=sent.deadline_ms,
        filter=sent.expression,
        rules=sent.rules,
        tiers=frozenset(Tier if sent.tiers is None else (*sent.tiers, Tier.POPULAR)),
        locked=frozenset(sent.locked),
        explore=sent.explore,
    )
