"""Explanations are found by request id; storing them neither delays nor fails a request."""

import json
from typing import Any
from urllib.parse import unquote

import pytest
from prometheus_client import CollectorRegistry

from services.contracts.access import ANYONE
from services.contracts.explanation import ExplanationAnswer
from services.contracts.message import decode
from services.contracts.recommend import Reason, Recommendation, RecommendRequest, Tier
from services.errors import DependencyUnavailable, NotFound
from services.gateway.records import explanations as module
from services.gateway.records.answer import AnswerRecord, RefusalRecord
from services.gateway.records.explanations import Explanations
from services.observability.metrics import GatewayMetrics
from services.router.deadline import Deadline
from services.router.policy import RoutingDecision
from tests.support.gateway.fakes import FakeShelf
from tests.support.wait import until
from tests.unit.gateway.clients import Door, RestClient
from tests.unit.gateway.world import World


def refusal(number: int, code: str = "overloaded", tenant: str | None = "") -> RefusalRecord:
    return RefusalRecord(request_id=f"r{number}", door="rest", code=code, message="no", now_ms=1, tenant=tenant)


def slow_answer(number: int, trace_id: Any = None) -> AnswerRecord:
    """Build the record of a shed request that was answered late."""
    request_id = f"r{number}"
    return AnswerRecord(
        request=RecommendRequest(request_id=request_id, user_id="u"),
        caller=ANYONE,
        door="rest",
        deadline=Deadline(0.0, 0.1, 0.0),
        planned=RoutingDecision(Tier.POPULAR, Reason.SHED),
        answer=Recommendation(
            request_id=request_id,
            items=(),
            tier=Tier.POPULAR,
            reason=Reason.SHED,
            bundle_version="v1",
            newest_event_time_ms=None,
            feature_age_ms=None,
            deadline_ms=100,
            stages_ms={},
        ),
        name="default",
        answered_s=1.0,
        now_ms=1,
        trace_id=trace_id,
    )


class Shelf:
    """Explanations with a fake store, not started."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.fake = FakeShelf()
        self.explanations = Explanations(self.fake, GatewayMetrics(self._registry).explanations)

    async def keep(self, *records: AnswerRecord | RefusalRecord) -> None:
        """Submit these records and write them."""
        for record in records:
            if isinstance(record, AnswerRecord):
                self.explanations.answered(record)
            else:
                self.explanations.refused(record)
        await self.explanations.flush()

    def counted(self, outcome: str) -> float:
        return self._registry.get_sample_value("tailrace_explanations_total", {"outcome": outcome}) or 0.0


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


async def explained(world: World, rest: RestClient, request_id: str) -> dict[str, Any]:
    """Return the explanation from the REST door."""
    await world.plane.explanations.flush()
    answer = await rest.http.get(f"/v1/explanations/{request_id}")
    assert answer.status_code == 200, answer.text
    decode(ExplanationAnswer, answer.content)  # as documented
    content: dict[str, Any] = answer.json()
    return content


@pytest.mark.parametrize(
    ("user_id", "tier", "list_state", "ranked"),
    [
        ("listed", "precomputed", "usable", []),
        ("long", "llm", "none", ["llm", "student"]),
        ("short", "student", "none", ["student"]),
        ("nobody", "popular", "none", []),
        ("stale", "llm", "older_than_events", ["llm", "student"]),
        ("foreign", "llm", "none", ["llm", "student"]),
    ],
)
async def test_an_answer_has_an_explanation(
    world: World, door: Door, rest: RestClient, user_id: str, tier: str, list_state: str, ranked: list[str]
) -> None:
    """Either door stores the tier, the state of the stored list, and the stages in the order of their start."""
    answer = await door.recommend({"user_id": user_id, "k": 3, "request_id": f"why-{user_id}"})

    explanation = await explained(world, rest, f"why-{user_id}")

    assert (explanation["tier"], explanation["door"], explanation["list_state"]) == (tier, door.name, list_state)
    assert (explanation["outcome"], explanation["user_id"], explanation["caller"]) == ("ok", user_id, "anonymous")
    assert explanation["reason"] == answer.body["reason"]
    assert [stage["name"] for stage in explanation["stages"]] == ["features", "route", "rank", *ranked, "answer"]
    assert explanation["sentences"]
    assert all(
        stage["offset_ms"] + stage["duration_ms"] <= explanation["elapsed_ms"] + 0.01 for stage in explanation["stages"]
    )


async def test_the_llms_own_numbers_are_included(world: World, rest: RestClient) -> None:
    """An LLM answer in time has the LLM's counts; another outcome has no counts."""
    await rest.recommend({"user_id": "long", "request_id": "in time"})
    world.llm.error = DependencyUnavailable("llm", 1.0)
    await rest.recommend({"user_id": "long", "request_id": "without"})

    in_time, without = await explained(world, rest, "in%20time"), await explained(world, rest, "without")

    assert (in_time["llm"]["outcome"], in_time["llm"]["num_prompt_tokens"]) == ("in_time", 1)
    assert without["llm"] == {**dict.fromkeys(in_time["llm"]), "outcome": "unavailable"}
    assert (without["planned_tier"], without["tier"], without["reason"]) == ("llm", "student", "llm_unavailable")


async def test_the_ranking_before_and_after_the_rules_is_included(world: World, rest: RestClient) -> None:
    """Each item has its positions before and after the rules that moved it, and a sentence names the main changes."""
    rules = {"pins": [{"item_id": "i09", "position": 1}], "blocks": [{"key": "item_id", "eq": "i05"}]}
    await rest.recommend({"user_id": "long", "k": 2, "request_id": "r1", "rules": rules})
    await rest.recommend({"user_id": "long", "k": 2, "request_id": "r2"})

    explanation, plain = await explained(world, rest, "r1"), await explained(world, rest, "r2")

    assert [(item["item_id"], item["before"], item["after"]) for item in explanation["ruled"]] == [
        ("i09", 5, 1),
        ("i04", 1, 2),
        ("i06", 2, None),
    ]
    assert {name for item in explanation["ruled"] for name in item["rules"]} == {"pins"}
    assert "The rules pins changed 3 places, for example i09 from 5 to 1, i04 from 1 to 2." in explanation["sentences"]
    assert plain["ruled"] == []


async def test_a_refused_request_has_an_explanation(world: World, door: Door, rest: RestClient) -> None:
    """The explanation has the caller's error code and message."""
    await door.recommend({"user_id": "long", "k": 0}, {"x-request-id": "refused"})

    explanation = await explained(world, rest, "refused")

    assert explanation["outcome"] == "invalid_request"
    assert "k: 0 is out of range" in explanation["sentences"][0]


@pytest.mark.parametrize("request_id", ["slash%2Fand%252Fslash", "Grüße", "a b", "100%2525", "a%2F%2F..%2Fb"])
async def test_any_request_id_can_be_looked_up(world: World, rest: RestClient, request_id: str) -> None:
    """An id may contain any printable character; the path is decoded once."""
    await rest.recommend({"user_id": "short", "request_id": unquote(request_id)})

    assert (await explained(world, rest, request_id))["request_id"] == unquote(request_id)


@pytest.mark.parametrize(
    ("request_id", "store_error", "status", "code", "words"),
    [
        ("never-seen", None, 404, "not_found", "TAILRACE_EXPLAIN_KEEP_S"),
        ("foreign", None, 404, "not_found", "another version"),
        ("r1", DependencyUnavailable("features", 1.0), 503, "unavailable", "features"),
    ],
)
async def test_what_cannot_be_explained_says_why(
    world: World, rest: RestClient, request_id: str, store_error: Exception | None, status: int, code: str, words: str
) -> None:
    """Unknown ids, explanations of another version, and an unavailable store have different errors."""
    await rest.recommend({"user_id": "long", "request_id": "r1"})
    await world.plane.explanations.flush()
    own, facts, *others = json.loads(world.shelf.records["r1"])
    world.shelf.records["foreign"] = json.dumps([own, [*facts, "one more"], *others]).encode()
    world.shelf.error = store_error

    response = await rest.http.get(f"/v1/explanations/{request_id}", headers={"x-request-id": "mine"})

    error = response.json()["error"]
    assert (response.status_code, error["code"], error["request_id"]) == (status, code, "mine")
    assert words in f"{error['message']}; {error['fix']}"


async def test_an_unavailable_store_loses_explanations_and_fails_no_request(shelf: Shelf) -> None:
    """Waiting records are dropped and counted; later records are kept once the store is back."""
    shelf.fake.error = DependencyUnavailable("features", 1.0)
    await shelf.keep(*map(refusal, range(40)))
    shelf.fake.error = None
    await shelf.keep(refusal(500))

    assert (shelf.counted("dropped"), shelf.counted("kept"), [*shelf.fake.records]) == (40, 1, ["r500"])


async def test_the_buffer_is_bounded(shelf: Shelf) -> None:
    """Half of the buffer is for all requests, half for slow requests; the excess between two writes is dropped."""
    await shelf.keep(*map(refusal, range(100)), *map(slow_answer, range(100, 200)))

    half = module._MAX_WAITING // 2
    assert set(shelf.fake.records) == {f"r{number}" for number in (*range(half), *range(100, 100 + half))}
    assert shelf.counted("dropped") == 200 - module._MAX_WAITING


@pytest.mark.parametrize(
    ("code", "tenant"), [("unauthenticated", None), ("unavailable", None), ("not_allowed", ""), ("not_allowed", "acme")]
)
async def test_an_unauthorized_request_leaves_no_explanation(shelf: Shelf, code: str, tenant: str | None) -> None:
    """No error code lets a caller without a key overwrite the explanations of others."""
    await shelf.keep(refusal(1, code, tenant))

    assert not shelf.fake.records


async def test_without_a_store_nothing_is_kept() -> None:
    """A retention time of 0 disables the store."""
    explanations = Explanations(None, GatewayMetrics(CollectorRegistry()).explanations)
    await explanations.start()
    explanations.refused(refusal(1))

    with pytest.raises(NotFound):
        await explanations.find("r1")
    await explanations.stop()


async def test_it_writes_by_itself_and_at_the_end(shelf: Shelf) -> None:
    """Records are written by a timer, and waiting records are written at the stop."""
    await shelf.explanations.start()
    shelf.explanations.refused(refusal(1))
    await until(lambda: shelf.fake.records)
    shelf.explanations.refused(refusal(2))
    await shelf.explanations.stop()

    assert set(shelf.fake.records) == {"r1", "r2"}
    assert (await shelf.explanations.find("r2")).outcome == "overloaded"


async def test_an_explanation_that_is_asked_for_at_once_is_found(shelf: Shelf) -> None:
    """Another gateway may have answered, and writes its records within a fraction of a second."""
    own = shelf.explanations
    other = Explanations(shelf.fake, GatewayMetrics(CollectorRegistry()).explanations)
    await own.start()
    own.refused(refusal(1))

    assert (await other.find("r1")).outcome == "overloaded"
    await own.stop()


async def test_a_record_that_cannot_be_encoded_stops_nothing(shelf: Shelf) -> None:
    """A record that cannot be encoded loses only its own batch."""
    await shelf.keep(slow_answer(1, trace_id=object()))
    await shelf.keep(refusal(2))

    assert [*shelf.fake.records] == ["r2"]
