"""An LLM tier behind `/v1/recommendations`: the data plane in front of a server of our own with vLLM-GR's schema."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.contracts.recommend import Recommendation, Tier
from services.errors import ConfigError
from services.llm.remote import RemoteLlm
from tests.support.wait import until
from tests.unit.gateway.openai.conftest import serve
from tests.unit.gateway.world import BREAKER_FAILURES, NUM_ITEMS, VERSION, World, started_world

NEEDED = {"user_id": str, "sequence": list, "top_k": int, "sampling_strategy": str, "beam_width": int}
PATIENT = {"deadline_ms": 5_000}
FOREIGN = {"item_id": "unknown-here", "score": 1.0, "metadata": {}}


class Recommender:
    """The server: the newest items of the catalogue first, unless told otherwise; refuses what its schema lacks."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Response | None = None
        self.hangs = False
        self.num_open = 0
        self.app = Starlette(routes=[Route("/v1/recommendations", self.recommend, methods=["POST"])])

    async def recommend(self, request: Request) -> Response:
        """Answer one request."""
        body = await request.json()
        if wrong := [name for name, kind in NEEDED.items() if not isinstance(body.get(name), kind)]:
            return JSONResponse({"detail": f"missing: {wrong}"}, 422)
        if not all(isinstance(event.get("item_id"), str) for event in body["sequence"]):
            return JSONResponse({"detail": "sequence"}, 422)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.hangs:
            await self._hang(request)
        return self.answer or JSONResponse(listed(body["top_k"]))

    async def _hang(self, request: Request) -> None:
        """Wait until the caller leaves."""
        self.num_open += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                while not await request.is_disconnected():  # noqa: ASYNC110 - Starlette has no event for it
                    await asyncio.sleep(0.01)
        self.num_open -= 1


def listed(num_items: int) -> dict[str, Any]:
    """Return an answer with the catalogue's last items and an item that the bundle lacks."""
    items = [
        {"item_id": f"i{NUM_ITEMS - 1 - position:02}", "score": -position / 10, "metadata": {}}
        for position in range(NUM_ITEMS)
    ]
    metrics = {"latency_ms": 5, "sequence_length": 4, "num_candidates_generated": num_items}
    return {"recommendations": [FOREIGN, *items[:num_items]], "metrics": metrics}


@pytest.fixture
def recommender() -> Recommender:
    """The server's behaviour."""
    return Recommender()


@pytest.fixture
async def world(recommender: Recommender, tmp_path: Path) -> AsyncIterator[World]:
    """A data plane whose LLM is the server, on a real port."""
    async for url in serve(recommender.app):
        llm = RemoteLlm(f"{url}/v1", lambda: "secret", beam_width=32)
        async with started_world(tmp_path, others={"default": llm}) as world:
            recommender.bodies.clear()
            yield world
        await llm.close()


def ids(answer: Recommendation) -> list[str]:
    """Return the item ids of an answer."""
    return [item.item_id for item in answer.items]


async def test_the_servers_items_are_the_answer(world: World, recommender: Recommender) -> None:
    """A user with history gets the server's items by score, without items that the bundle does not have."""
    answer = await world.recommend("long", **PATIENT)

    assert (ids(answer), answer.tier) == (["i19", "i18", "i17"], Tier.LLM)
    assert [event["item_id"] for event in recommender.bodies[0]["sequence"]] == ["i00", "i01", "i02", "i03"]
    assert recommender.bodies[0]["user_id"] == "long"
    assert recommender.headers[-1]["authorization"] == "Bearer secret"
    assert int(recommender.headers[-1]["x-deadline-ms"]) <= PATIENT["deadline_ms"]


async def test_exclusions_hold_over_the_server(world: World, recommender: Recommender) -> None:
    """Excluded items never appear, and the server is asked for enough items to fill the list without them."""
    answer = await world.recommend("long", **PATIENT, exclude_item_ids=("i19", "i17"))

    assert (ids(answer), answer.tier) == (["i18", "i16", "i15"], Tier.LLM)
    assert recommender.bodies[0]["top_k"] >= 3 + 4 + 2
    assert recommender.bodies[0]["beam_width"] >= recommender.bodies[0]["top_k"]


async def test_the_student_answers_for_a_hanging_server(world: World, recommender: Recommender) -> None:
    """Within the deadline another tier answers, and the server's request is cancelled."""
    recommender.hangs = True

    answer = await world.recommend("long", deadline_ms=200)

    assert (len(answer.items), answer.tier) == (3, Tier.STUDENT)
    await until(lambda: recommender.num_open == 0)


@pytest.mark.parametrize(
    "wrong",
    [
        Response("{", 200),
        JSONResponse({"items": []}),
        JSONResponse({"recommendations": [{"item_id": "i05", "score": "high"}]}),
        JSONResponse({"recommendations": []}),
        Response('{"recommendations": [{"item_id": "i05", "score": 1e999}]}', 200),
        JSONResponse({"detail": "no"}, 422),
        JSONResponse({"detail": "full"}, 429),
        JSONResponse({"detail": "late"}, 504),
        Response("", 500),
    ],
)
async def test_the_student_answers_for_a_wrong_answer(world: World, recommender: Recommender, wrong: Response) -> None:
    """An answer outside the schema, a refusal or an error costs no item of the list."""
    recommender.answer = wrong

    answer = await world.recommend("long", **PATIENT)

    assert (len(answer.items), answer.tier) == (3, Tier.STUDENT)


async def test_a_failing_server_is_no_longer_asked(world: World, recommender: Recommender) -> None:
    """After failures in a row the breaker opens: the server gets no more requests."""
    recommender.answer = Response("", 500)

    answers = [await world.recommend("long", **PATIENT) for _ in range(BREAKER_FAILURES + 3)]

    assert [answer.tier for answer in answers] == [Tier.STUDENT] * len(answers)
    assert len(recommender.bodies) == BREAKER_FAILURES
    assert world.metric("tailrace_breaker_open", name="default") == 1


async def test_without_its_key_the_server_is_unavailable(tmp_path: Path) -> None:
    """A key file that cannot be read costs the LLM's answers only."""

    def no_key() -> str:
        raise ConfigError("TAILRACE_LLM_URL_KEY_FILE: no such file")

    llm = RemoteLlm("http://127.0.0.1:9/v1", no_key, beam_width=32)
    async with started_world(tmp_path, others={"default": llm}) as world:
        answer = await world.recommend("long", **PATIENT)

    assert (answer.tier, answer.bundle_version) == (Tier.STUDENT, VERSION)
    await llm.close()
