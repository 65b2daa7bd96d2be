"""Every query of every dashboard, and every rule, against a running stack: `pytest tests/e2e/test_dashboards.py`."""

import math
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.prometheus import WHY_NOT, Prometheus
from tests.support.promql import all_targets, filled_in
from tests.support.servers import HOST
from tests.support.stack import Stack, new_user_id

KNOWN_USER, LISTED_USERS = "1", [str(number) for number in range(2, 400)]
MAY_BE_EMPTY = {
    "Alerts that fire": "none should",
    "Student fell out": "it does not, here",
    "Answers that the LLM was too busy for": "it has time, here",
    "First token and next token, p99": "no text is written, here",
}
"""Panels, with the reason why all is well when they show nothing."""
BOARD_OF_TEXT = "text"
"""The dashboard that stays empty here, since this stack serves no text."""
NEVER_AT_WORK = {"TailraceNoBundle", "TailraceWorkerAway", "TailraceTargetDown", "TailraceLlmReplicasAway"}

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def prometheus(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus over the stack, after traffic of each tier."""
    with Prometheus(tmp_path_factory.mktemp("prometheus"), f"{HOST}:{stack.settings.metrics_port}") as started:
        tiers = set(send_traffic(stack)) | set(send_traffic(stack))
        assert tiers >= {"precomputed", "llm", "student", "popular"}
        yield started


def send_traffic(stack: Stack) -> Iterator[str]:
    """Cause something of everything: each tier, an event that was made twice, a click on an answer. Gives the tiers."""
    stack.sees_click(KNOWN_USER, "50")
    event = {"event_id": uuid.uuid4().hex, "event_time_ms": int(time.time() * 1_000)}
    for _ in range(2):
        stack.click(KNOWN_USER, "51", **event)
    visitor = new_user_id()
    yield stack.recommend(visitor, deadline_ms=1_000)["tier"]
    stack.sees_click(visitor, "50")
    for user_id in (KNOWN_USER, visitor, *LISTED_USERS[::80]):
        yield stack.recommend(user_id, deadline_ms=1_000)["tier"]
    follow(stack, stack.recommend(visitor))
    yield precomputed(stack)["tier"]


def follow(stack: Stack, answer: dict[str, Any]) -> None:
    """Click on an answer's items, one request each, so that every gateway hears of it, the one that answered too."""
    for item in answer["items"][:4]:
        stack.click(new_user_id(), item["item_id"], request_id=answer["request_id"])


def precomputed(stack: Stack) -> dict[str, Any]:
    """Ask until somebody has a stored list."""
    answers = (stack.recommend(user_id) for user_id in LISTED_USERS)
    return next(answer for answer in answers if answer["tier"] == "precomputed")


def has_data(series: list[dict[str, Any]]) -> bool:
    """Whether there is a number in it."""
    return any(not math.isnan(float(one["value"][1])) for one in series)


def test_every_panel_has_data(stack: Stack, prometheus: Prometheus) -> None:
    """While there is traffic, no query of any dashboard is refused or comes back empty, but for the few that should."""
    wanted = {
        (f"{board}: {title}", filled_in(expr))
        for board, title, expr in all_targets()
        if title not in MAY_BE_EMPTY and board != BOARD_OF_TEXT
    }
    give_up = time.monotonic() + 120.0

    while wanted and time.monotonic() < give_up:
        list(send_traffic(stack))
        wanted = {(name, expr) for name, expr in wanted if not has_data(prometheus.query(expr))}

    assert sorted(wanted) == []


def test_panels_that_may_be_empty_are_there_and_are_queries(prometheus: Prometheus) -> None:
    """The allow-list names panels that exist, and Prometheus understands them."""
    exprs = {title: expr for _, title, expr in all_targets() if title in MAY_BE_EMPTY}

    assert exprs.keys() == MAY_BE_EMPTY.keys()
    for expr in exprs.values():
        assert isinstance(prometheus.query(filled_in(expr)), list)


def test_every_rule_is_evaluated(prometheus: Prometheus) -> None:
    """Each rule has run on real data without an error."""
    give_up = time.monotonic() + 60.0
    while (unhealthy := prometheus.unhealthy_rules()) and time.monotonic() < give_up:
        time.sleep(0.5)

    assert unhealthy == []


def test_nothing_is_missing_while_all_is_well(prometheus: Prometheus) -> None:
    """No alert about missing data or missing parts is even pending on a stack that works."""
    said = {one["metric"]["alertname"] for one in prometheus.query("ALERTS")}

    assert not said & (NEVER_AT_WORK | {"TailraceSloDataMissing"})
    assert prometheus.query('up{job="tailrace"} == 1')


def test_every_objective_has_a_burn_rate_and_a_budget(prometheus: Prometheus) -> None:
    """Each objective's recorded series are there as soon as something is counted."""
    from services.observability.objectives import load_objectives

    names = {one.name for one in load_objectives().objectives}

    for series in ("tailrace:slo_burn:rate1h", "tailrace:slo_budget_left:ratio"):
        assert {one["metric"]["slo"] for one in prometheus.query(series)} == names
