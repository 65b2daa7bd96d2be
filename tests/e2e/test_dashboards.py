"""Every query of every dashboard, and every rule, against a running stack."""

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
    "Firing alerts": "no alert fires on a healthy stack",
    "Student failures": "it does not fail here",
    "Answers without the LLM because of load": "it has time here",
    "First token and next token, p99": "this stack serves no text",
}
"""Panels that may show nothing on a healthy stack, with the reason."""
BOARD_OF_TEXT = "text"
"""The dashboard that is empty, since this stack serves no text."""
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
    """Send requests for each tier, a repeated event, and clicks on an answer; yield the tiers."""
    stack.sees_click(KNOWN_USER, "50")
    event = {"event_id": uuid.uuid4().hex, "event_time_ms": int(time.time() * 1_000)}
    for _ in range(2):
        stack.click(KNOWN_USER, "51", **event)
    visitor = new_user_id()
    yield stack.recommend(visitor, deadline_ms=1_000)["tier"]
    stack.sees_click(visitor, "50")
    for user_id in (KNOWN_USER, visitor, *LISTED_USERS[::80]):
        yield stack.recommend(user_id, deadline_ms=1_000)["tier"]
    answer = stack.recommend(visitor)
    for item in answer["items"][:4]:  # one request each, so that every gateway gets one, the one that answered too
        stack.click(new_user_id(), item["item_id"], request_id=answer["request_id"])
    tiers = (stack.recommend(user_id)["tier"] for user_id in LISTED_USERS)
    yield next(tier for tier in tiers if tier == "precomputed")


def has_data(series: list[dict[str, Any]]) -> bool:
    """Whether any series has a number."""
    return any(not math.isnan(float(one["value"][1])) for one in series)


def test_every_panel_has_data(stack: Stack, prometheus: Prometheus) -> None:
    """While there is traffic, every query of every dashboard returns data, except the panels that may be empty."""
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


def test_every_rule_is_evaluated(prometheus: Prometheus) -> None:
    """Each rule has run on real data without an error."""
    give_up = time.monotonic() + 60.0
    while (unhealthy := prometheus.unhealthy_rules()) and time.monotonic() < give_up:
        time.sleep(0.5)

    assert unhealthy == []


def test_no_alert_about_missing_parts_is_pending(prometheus: Prometheus) -> None:
    """On a healthy stack, neither parts nor data are missing."""
    pending = {one["metric"]["alertname"] for one in prometheus.query("ALERTS")}

    assert not pending & (NEVER_AT_WORK | {"TailraceSloDataMissing"})
    assert prometheus.query('up{job="tailrace"} == 1')
