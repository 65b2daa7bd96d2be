"""Plan and figures of a row of the fault matrix."""

from typing import Any

import pytest

import tailrace_client
from benchmarks.faults.batch_probe import BatchProbe, BatchUser, SentEvents
from benchmarks.faults.event_probe import EventProbe, ProbeEvent
from benchmarks.faults.peer import TextProbe, app_of
from benchmarks.faults.rows import Phases, Planned, row_of
from benchmarks.load.clients import RestClient
from benchmarks.load.open_loop import Load, RequestOutcome, Shot
from services.contracts.access import Priority
from services.contracts.rank import RankRequest
from services.contracts.text import ChatMessage, TextPiece, TextRequest
from services.gateway.openai.remote.client import RemoteWriter
from services.llm.remote import RemoteLlm
from tailrace_client import Recorded, TailraceError
from tests.unit.gateway.openai.conftest import serve

PHASES = Phases(before_s=2, during_s=3, after_s=5)
WEIGHTS = {"llm": 1.0, "student": 0.5}


def test_a_row_of_the_matrix() -> None:
    """Figures of a fault from second 2 to 5: answers recover at 6, and events become visible at 5.5.

    The student answers until 6, and one event is rejected. An acknowledged event that never becomes visible is lost,
    and the recovery time is then None.
    """
    planned = [Planned(number / 10, Priority.HIGH) for number in range(100)]
    shots = [
        Shot(0.01, 0.0, RequestOutcome(True, tier, reason, num_attempts=1 + (number == 20)), request.at_s, number)
        for number, request in enumerate(planned)
        for tier, reason in [("student", "llm_unavailable") if 2 <= request.at_s < 6 else ("llm", "llm_in_time")]
    ]
    probe = EventProbe.__new__(EventProbe)
    probe.events = [ProbeEvent("a", 1, 1.0, 1.1, 1.2), ProbeEvent("b", 2, 3.0), ProbeEvent("c", 3, 5.2, 5.3, 5.5)]

    row = row_of(planned, Load(shots, 10.0, 0.1), probe, 5.0, PHASES, WEIGHTS)

    assert (row["availability"], row["deadline_met"], row["goodput"]) == (1, 1, 0.8)
    assert row["answered_at_once"] == 0.99
    assert (row["answers_recovered_s"], row["events_recovered_s"], row["recovery_s"]) == (1.0, 0.5, 1.0)
    assert row["events"] == {"sent": 3, "acknowledged": 2, "lost": 0}
    assert row["during"]["tiers"] == {"student": 1}
    probe.events = [ProbeEvent("a", 1, 6.0, 6.1)]
    healthy = [
        Shot(0.01, 0, RequestOutcome(True, "llm", "llm_in_time"), request.at_s, i) for i, request in enumerate(planned)
    ]
    lost = row_of(planned, Load(healthy, 10.0, 0.1), probe, 5.0, PHASES, WEIGHTS)
    assert lost["events"]["lost"] == 1
    assert (lost["answers_recovered_s"], lost["recovery_s"]) == (0, None)


def test_texts_of_a_peer_are_counted_by_outcome() -> None:
    """Lists without a text count as answers; recovery is the first text after the server's return."""
    probe = TextProbe(RestClient("localhost", 1), {})
    probe.answers = [
        (1.0, "written", True, True),
        (2.5, "failed", True, True),
        (3.0, "late", False, True),
        (5.5, "failed", True, True),
        (6.0, "written", True, True),
    ]

    assert probe.result(back_s=5.0) == {
        "asked": 5,
        "outcomes": {"failed": 2, "late": 1, "written": 2},
        "lists": 5,
        "in_time": 4,
        "recovered_s": 1.0,
    }


async def test_a_peer_ranks_and_writes_what_our_clients_read() -> None:
    """Our clients of other servers get a list and a text from the process of the fault rows."""
    async for url in serve(app_of([f"i{number}" for number in range(30)])):
        llm, writer = RemoteLlm(f"{url}/v1", lambda: "", beam_width=8), RemoteWriter(f"{url}/v1", lambda: "")
        asked = RankRequest(
            request_id="r", user_id="u", bundle_version="v", history_item_ids=("i1",), k=5, budget_ms=5_000
        )
        ranked = await llm.rank(asked, timeout_s=5.0)
        (model,) = await writer.models()
        request = TextRequest(request_id="t", model=model.name, messages=(ChatMessage(role="user", content="why"),))
        texts = [event.text async for event in writer.write(request) if isinstance(event, TextPiece)]
        await llm.close()
        await writer.close()

        assert len(set(ranked.item_ids)) == len(ranked.item_ids) >= 5
        assert "".join(texts) == "You will like these."


class ForgetfulDoor:
    """Stores the first batch of events but rejects it; its store counts distinct ids or all events."""

    def __init__(self) -> None:
        self.stored: list[str] = []

    async def record(self, events: list[tailrace_client.Event]) -> Recorded:
        """Store events; reject the first batch."""
        self.stored += [event.event_id for event in events]
        if len(self.stored) == len(events):
            raise TailraceError("unavailable", "late", num_attempts=2)
        return Recorded(tuple(self.stored))


@pytest.mark.parametrize(("count", "lost", "doubled"), [(set, 0, 0), (list, 0, 3), (lambda _: [], 3, 0)])
async def test_batches_are_sent_until_acknowledged_and_counted(count: Any, lost: int, doubled: int) -> None:
    """A rejected batch is retried; events stored more than once count as doubled, missing events as lost."""
    door: Any = ForgetfulDoor()
    batch = SentEvents([tailrace_client.Event("u", "i") for _ in range(3)])

    async def num_events(_user_id: str) -> int:
        return len(count(door.stored))

    probe = BatchProbe([door], "i", num_events)
    probe.users.append(BatchUser([batch]))
    await probe.send(door, batch)
    await probe.finish(last_chance_s=0.0)

    counted = {"sent": 1, "attempts": 3, "acknowledged": 1, "lost": lost, "doubled": doubled}
    assert probe.result() == {"events_each": 500, **counted}
