"""Records of answers reach their sinks in batches."""

import asyncio
from contextvars import ContextVar
from pathlib import Path

from structlog.testing import capture_logs

from services.contracts.events import EventBody
from services.contracts.tenant import DEFAULT_TENANT
from services.gateway.records.answer import AnswerRecord
from services.gateway.records.batches import AnswerBatches
from tests.support.wait import until
from tests.unit.gateway.records.test_explanations import slow_answer
from tests.unit.gateway.world import started_world

REQUEST: ContextVar[int] = ContextVar("request", default=0)
FOREVER_S = 3_600.0


async def test_each_sink_gets_the_records_in_order_and_in_their_contexts() -> None:
    """A record that a sink fails on is lost for this sink only."""
    seen: list[tuple[str, str, int]] = []

    def failing(record: AnswerRecord) -> None:
        seen.append(("failing", record.request.request_id, REQUEST.get()))
        if record.request.request_id == "r1":
            raise ZeroDivisionError

    def other(record: AnswerRecord) -> None:
        seen.append(("other", record.request.request_id, REQUEST.get()))

    batches = AnswerBatches((failing, other), FOREVER_S)
    for number in (1, 2):
        REQUEST.set(number)
        batches.answered(slow_answer(number))
    REQUEST.set(3)
    assert seen == []
    with capture_logs() as lines:
        batches.flush()

    assert seen == [(name, f"r{number}", number) for name in ("failing", "other") for number in (1, 2)]
    assert [line["event"] for line in lines] == ["record_lost"]


async def test_many_records_do_not_wait_and_a_stop_passes_on_the_rest() -> None:
    """Eight records make a batch; fewer wait for the period, or for the stop."""
    seen: list[str] = []
    batches = AnswerBatches((lambda record: seen.append(record.request.request_id),), FOREVER_S)
    await batches.start()
    for number in range(9):
        batches.answered(slow_answer(number))
        await asyncio.sleep(0)
    full = [*seen]
    await batches.stop()

    assert (full, seen[8:]) == (seen[:8], ["r8"])


async def test_a_plane_records_by_itself(tmp_path: Path) -> None:
    """The impression of a single answer follows after the period."""
    async with started_world(tmp_path, record_every_s=0.02) as world:
        await world.recommend()
        await until(lambda: len(world.impressions.records) == 1)


async def test_a_click_finds_an_answer_whose_record_waits(tmp_path: Path) -> None:
    """An event is attributed to the answer that it names, however soon it comes."""
    async with started_world(tmp_path, record_every_s=FOREVER_S) as world:
        shown = await world.recommend(request_id="shown")
        await world.plane.record([EventBody("long", "i05", request_id="shown")], DEFAULT_TENANT, "rest", "r")

    labels = {"tier": shown.tier.value, "bundle_version": shown.bundle_version}
    assert world.metric("tailrace_attributed_events_total", **labels) == 1
