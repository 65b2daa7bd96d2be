"""Mixed load: recommendations of three priorities over REST and gRPC, events over both, and text over the OpenAI door.

Of 25 requests 18 are recommendations, six post events and one is a text. A request's number determines its content.
"""

import json
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import tailrace_client
from benchmarks.faults.scene import Scene
from benchmarks.load.clients import RestClient
from benchmarks.load.open_loop import RequestOutcome
from benchmarks.soak.ledger import Answered, Ledger
from services.contracts.access import Priority
from tailrace_client import TailraceError

DEADLINES_MS = {Priority.HIGH: 200, Priority.NORMAL: 500, Priority.LOW: 100}
EVENT_DEADLINE_MS = 3_000.0
TEXT_DEADLINE_MS = 5_000
"""Deadlines of the rows' fractions in time; the stack's own deadline of texts is longer."""
_PRIORITIES = (*[Priority.HIGH] * 5, *[Priority.NORMAL] * 2, Priority.LOW)
_KINDS = (*["recommend"] * 18, *["event"] * 6, "text")
_STRIDE = 7
_DOORS = ("REST", "gRPC")
_NUM_USERS = 24
_MOST_EVENTS = 3
_TEXT_TOKENS = 6
_EXPLAIN_EVERY = 10


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the mix. `door` is 0 for REST and 1 for gRPC."""

    number: int

    @property
    def kind(self) -> str:
        return _KINDS[self.number * _STRIDE % len(_KINDS)]

    @property
    def door(self) -> int:
        """Return the door: alternately four requests through each."""
        return self.number // 4 % len(_DOORS)

    @property
    def priority(self) -> Priority:
        return _PRIORITIES[self.number // len(_KINDS) % len(_PRIORITIES)]

    @property
    def row(self) -> str:
        """Return the report row of this request."""
        if self.kind == "text":
            return "text over OpenAI"
        what = "events" if self.kind == "event" else f"recommendations, {self.priority.name.lower()}"
        return f"{what} over {_DOORS[self.door]}"

    @property
    def deadline_ms(self) -> float:
        """Return its row's deadline."""
        deadlines = {"event": EVENT_DEADLINE_MS, "text": float(TEXT_DEADLINE_MS)}
        return deadlines.get(self.kind, float(DEADLINES_MS[self.priority]))


@dataclass(slots=True)
class Traffic:
    """Sends the requests of one run, and keeps the ledger of events and the answers to look up."""

    scene: Scene
    text: RestClient
    seed: int
    ledger: Ledger = field(default_factory=Ledger)
    answered: list[Answered] = field(default_factory=list)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    async def send(self, number: int) -> RequestOutcome:
        """Send request `number`; a refusal is an outcome."""
        request = Request(number)
        if request.kind == "event":
            return await self._record(request)
        return await (self._write() if request.kind == "text" else self._recommend(request))

    @property
    def user_ids(self) -> list[str]:
        """Return the users of the sent events: few, so that their rows soon reach their maximal length."""
        return [f"soak-{self.run_id}-{number}" for number in range(_NUM_USERS)]

    async def _recommend(self, request: Request) -> RequestOutcome:
        request_id = f"soak-{self.run_id}-{request.number}"
        caller = self.scene.doors[request.priority][request.door]
        about = {"deadline_ms": DEADLINES_MS[request.priority], "request_id": request_id}
        outcome = await caller.recommend({**self._ask(request.number), **about})
        if outcome.is_ok and request.number % _EXPLAIN_EVERY == 0:
            self.answered.append(Answered(request_id, outcome.tier, outcome.reason, time.monotonic()))
        return outcome

    def _ask(self, number: int) -> dict[str, Any]:
        """Request in turn for eight users with current events and two of each tier, four times over either door."""
        if number // 8 % 2:
            return self.scene.audience.mixed(number)
        return {"user_id": self.user_ids[number % _NUM_USERS], "k": 10}

    async def _record(self, request: Request) -> RequestOutcome:
        draw = random.Random(f"{self.seed} {request.number}")
        events = [
            tailrace_client.Event(draw.choice(self.user_ids), draw.choice(self.scene.audience.item_ids))
            for _ in range(draw.randint(1, _MOST_EVENTS))
        ]
        sent = {event.event_id for event in events}
        try:
            recorded = await self.scene.batches[request.door].record(events, deadline_ms=EVENT_DEADLINE_MS)
        except TailraceError as error:
            self.ledger.refused |= sent
            return RequestOutcome(False, "none", error.code, error.num_attempts)
        except BaseException:
            self.ledger.refused |= sent
            raise
        self.ledger.acknowledged |= sent
        return RequestOutcome(True, "none", "recorded", recorded.num_attempts)

    async def _write(self) -> RequestOutcome:
        model = self.scene.settings.text_path.rpartition("/")[2]
        body = {"model": model, "prompt": "The river", "max_tokens": _TEXT_TOKENS, "temperature": 0}
        status, answer = await self.text.call(b"POST", b"/v1/completions", json.dumps(body).encode())
        if status != 200:
            return RequestOutcome(False, "none", f"http_{status}")
        choice = json.loads(answer)["choices"][0]
        return RequestOutcome(bool(choice["finish_reason"]), "none", str(choice["finish_reason"]))
