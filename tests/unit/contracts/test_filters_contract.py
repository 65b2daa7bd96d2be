"""Expressions and rules are parsed strictly; errors name the path of the problem."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.filters import all_of
from services.contracts.message import Message, convert
from services.contracts.recommend import Filters, RecommendBody
from services.contracts.rules import NAMES, NO_RULES, Boost, Rules
from services.errors import InvalidRequest

OK = {"key": "a", "eq": 1}


def nested(depth: int) -> dict[str, Any]:
    return {"must": [OK if depth == 1 else nested(depth - 1)]}


@pytest.mark.parametrize(
    ("plain", "path"),
    [
        ({"must": OK}, "f.must"),
        ({"must": [3]}, "f.must[0]"),
        ({"must": [{"eq": 1}]}, "f.must[0].key"),
        ({"must": [{"key": "", "eq": 1}]}, "f.must[0].key"),
        ({"must": [{"key": "a"}]}, "f.must[0]"),
        ({"must": [{"key": "a", "eq": None}]}, "f.must[0]"),
        ({"must": [{**OK, "exists": True}]}, "f.must[0]"),
        ({"must": [{"key": "a", "eq": [1]}]}, "f.must[0].eq"),
        ({"must": [{"key": "a", "eq": float("nan")}]}, "f.must[0].eq"),
        ({"must": [{"key": "a", "eq": 10**400}]}, "f.must[0].eq"),
        ({"must": [{"key": "a", "eq": "x\n"}]}, "f.must[0].eq"),
        ({"must": [{"key": "a", "in": []}]}, "f.must[0].in"),
        ({"must": [{"key": "a", "in": [1, {}]}]}, "f.must[0].in[1]"),
        ({"must": [OK, {"key": "a", "range": 3}]}, "f.must[1].range"),
        ({"must": [OK, {"key": "a", "range": {}}]}, "f.must[1].range"),
        ({"must": [OK, {"key": "a", "range": {"lt": True}}]}, "f.must[1].range.lt"),
        ({"must": [OK, {"key": "a", "range": {"lt": 1, "lte": 2}}]}, "f.must[1].range.lt"),
        ({"must": [OK, {"key": "a", "range": {"max": 1}}]}, "f.must[1].range.max"),
        ({"should": [{"key": "a", "exists": "yes"}]}, "f.should[0].exists"),
        ({"should": [{"key": "a", "equals": 1}]}, "f.should[0].equals"),
        ({"must_not": [{"must": [OK], "key": "a"}]}, "f.must_not[0].key"),
        ({"must_not": [{"must": []}]}, "f.must_not[0]"),
        (nested(6), "f.must[0].must[0].must[0].must[0].must[0]"),
        ({"must": [{"should": [OK] * 60}, {"should": [OK] * 60}]}, "f"),
        ({"must": [{"key": "a", "in": [0] * 1_500}] * 2}, "f"),
    ],
)
def test_a_wrong_expression_is_refused_by_its_path(plain: dict[str, Any], path: str) -> None:
    """The first problem in the order of the expression is reported."""
    with pytest.raises(InvalidRequest, check=lambda error: error.field == path):
        convert(Filters, plain, "f")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["key", "eq", "in", "range", "exists", "must", "should", "must_not", "lt", "x", *NAMES]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_read_or_refused(plain: Any) -> None:
    """Any JSON is either parsed or rejected, and parsing is deterministic."""
    for kind in (Boost, Filters, Rules):
        sent = {"where": plain, "factor": 1} if kind is Boost else plain
        first, second = outcome_of(kind, sent), outcome_of(kind, sent)
        assert first == second
        assert not isinstance(first, str) or first.startswith("f")


@given(JSON)
def test_a_body_reads_filters_and_rules_as_they_are_read_alone(plain: Any) -> None:
    """A body's filters and rules equal the message read by itself, at first and again, and so do their errors."""
    for name, kind in (("filters", Filters), ("rules", Rules)):
        alone = None if plain is None else outcome_of(kind, plain, name)
        for _ in range(2):
            body = outcome_of(RecommendBody, {"user_id": "u", name: plain}, "")
            assert (getattr(body, name) if isinstance(body, RecommendBody) else body) == alone


@pytest.mark.parametrize("value", [1, 1.0, True, "1", 0.0, -0.0, False, float("nan")])
def test_values_that_python_holds_equal_are_read_apart(value: Any) -> None:
    """A number, a flag and a text read earlier are never taken for each other, nor is NaN."""
    for other in (1, 1.0, True, "1", 0, False):
        convert(RecommendBody, {"user_id": "u", "filters": {"must": [{"key": "a", "eq": other}]}})
    plain = {"must": [{"key": "a", "eq": value}]}

    body = outcome_of(RecommendBody, {"user_id": "u", "filters": plain}, "")

    if value != value:
        assert body == "filters.must[0].eq"
    else:
        assert isinstance(body, RecommendBody)
        assert repr(body.filters) == repr(convert(Filters, plain))


def outcome_of(kind: type[Message], plain: Any, path: str = "f") -> object:
    try:
        return convert(kind, plain, path)
    except InvalidRequest as error:
        return error.field


def test_no_clause_is_no_expression() -> None:
    """Absent, null and empty branches are equal; combining an expression with None returns the expression."""
    assert convert(Filters, {}).expression is convert(Filters, {"must": [], "should": None}).expression is None
    expression = convert(Filters, {"must": [OK]}).expression
    assert all_of(None, expression) is expression
    assert all_of(None, None) is None


@pytest.mark.parametrize(
    ("plain", "path"),
    [
        ([], "r"),
        ({"boost": []}, "r.boost"),
        ({"boosts": [{"factor": 2}]}, "r.boosts[0].where"),
        ({"boosts": [{"where": OK, "factor": 0}]}, "r.boosts[0].factor"),
        ({"boosts": [{"where": {"key": "a"}, "factor": 2}]}, "r.boosts[0].where"),
        ({"pins": [{"item_id": "a", "position": 0}]}, "r.pins[0].position"),
        ({"pins": [{"item_id": "a", "position": 1.5}]}, "r.pins[0].position"),
        ({"pins": [{"item_id": "a", "position": 1}, {"item_id": "a", "position": 2}]}, "r.pins[1].item_id"),
        ({"pins": [{"item_id": "a", "position": 1}, {"item_id": "b", "position": 1}]}, "r.pins[1].position"),
        ({"blocks": [OK, {}]}, "r.blocks[1].key"),
        ({"caps": [{"attribute": "a", "most": 0}]}, "r.caps[0].most"),
        ({"diversity": 1.1}, "r.diversity"),
        ({"decay": 0}, "r.decay"),
        ({"freshness": {"factor": 2}}, "r.freshness.half_life_h"),
        ({"freshness": {"factor": 0.5, "half_life_h": 1}}, "r.freshness.factor"),
        ({"pins": [{"item_id": f"i{n}", "position": n + 1} for n in range(21)]}, "r.pins"),
    ],
)
def test_a_wrong_rule_is_refused_by_its_path(plain: Any, path: str) -> None:
    """The error names the path of the value that breaks a rule's limit."""
    with pytest.raises(InvalidRequest, check=lambda error: error.field == path):
        convert(Rules, plain, "r")


def test_a_request_s_rules_come_in_the_place_of_the_surface_s_and_blocks_add_up() -> None:
    """A request's rules replace the surface's, also with an empty list or zero, which turn a rule off."""
    surface = convert(Rules, {"diversity": 0.5, "caps": [{"attribute": "a", "most": 1}], "blocks": [OK]})
    own = convert(Rules, {"diversity": 0, "caps": [], "blocks": [{"key": "b", "exists": True}], "decay": 0.5})

    both = surface.overridden_by(own)

    assert (both.diversity, both.caps, both.decay) == (0, (), 0.5)
    assert both.blocks == (surface.blocks or ()) + (own.blocks or ())
    assert surface.overridden_by(NO_RULES) == surface
    assert surface.reorder
    assert not Rules(blocks=surface.blocks, caps=(), diversity=0.0).reorder
