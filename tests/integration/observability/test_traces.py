"""Traces from a request to the engine, and from an event through Kafka to the features, at an OTLP collector.

With a real Valkey, a real broker, the worker, and an LLM replica without Ray: its messages are pickled all the same.
"""

import asyncio
import gc
import pickle
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import partial

import httpx
import pytest
from prometheus_client import CollectorRegistry

from models.registry.name_record import DEFAULT_NAME
from models.registry.store import BundleStore
from services.contracts.rank import RankRequest, RankResult
from services.features.erasing import RedisReceipts
from services.features.explanations import RedisExplanations
from services.features.page_key import RedisPageKey
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress
from services.gateway.build import Ports, build_data_plane
from services.gateway.data_plane import DataPlane
from services.gateway.events.producer import TopicProducer
from services.gateway.overload.admission import AdmissionLimits
from services.gateway.rest.door import create_rest_app
from services.items.live_items import LiveItems
from services.items.snapshot import Positions, write_snapshot
from services.llm.ranking.deployment import LlmDeployment
from services.llm.serving.reply import Refusal
from services.observability.tracing import open_tracing
from services.router.policy import LlmRule
from services.settings.settings import Settings
from tests.support.collector import Collector
from tests.support.gateway.fakes import FakeItemTopic, FakeLog, FakeStudent
from tests.support.spans import traceparent
from tests.support.stream.stream_rig import TOPIC, Rig
from tests.support.training.bundles import publish_bundle
from tests.support.wait import until_answer
from tests.unit.gateway.world import CONFIG, no_user_data

TRACE = {"read": 0x5EED01, "click": 0x5EED02}


class NearLlm:
    """A replica in this process; requests and answers are pickled, as Ray would."""

    def __init__(self, replica: LlmDeployment) -> None:
        self._replica = replica

    def replicas(self) -> tuple[str, ...]:
        return ()

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank with the pickled request."""
        reply = await self._replica.rank(pickle.loads(pickle.dumps(request)))
        if isinstance(reply, Refusal):
            raise reply.as_error()
        return pickle.loads(pickle.dumps(reply))


@dataclass
class Scene:
    """All components that a traced request passes."""

    collector: Collector
    door: httpx.AsyncClient

    async def click(self, trace_id: int) -> None:
        """Record an event as part of a trace."""
        header = {"traceparent": traceparent(trace_id)}
        answer = await self.door.post("/v1/events", json={"user_id": "u", "item_id": "i3"}, headers=header)
        assert answer.status_code == 200, answer.text

    async def recommend(self, trace_id: int) -> dict:
        """Request recommendations as part of a trace."""
        header = {"traceparent": traceparent(trace_id)}
        body = {"user_id": "u", "k": 3, "deadline_ms": 5_000, "request_id": f"r-{trace_id:x}"}
        answer = await self.door.post("/v1/recommendations", json=body, headers=header)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def arrived(self, trace_id: int, *names: str) -> dict:
        return await asyncio.to_thread(self.collector.wait_for, trace_id, *names)


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that listens."""
    listening = Collector()
    yield listening
    listening.stop()


@pytest.fixture
async def scene(rig: Rig, features: RepoAddress, collector: Collector) -> AsyncIterator[Scene]:
    """The REST server over all components. Only callers decide whether to trace."""
    traced = {"otlp_endpoint": collector.endpoint, "trace_share": 0.0, "bundle_poll_s": 0.02, "kv_num_blocks": 64}
    settings = rig.settings = rig.settings.model_copy(update=traced)
    rig.start_worker()
    publish_bundle(settings.bundle_root, "v1")
    write_snapshot(settings.items_snapshot, LiveItems(), Positions("", {}))  # no replica ranks without states
    replica = LlmDeployment(settings)
    reader = FeatureReader(features, settings.topic_partitions)
    plane = build(settings, reader, NearLlm(replica))
    await plane.start()
    tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, "tailrace-gateway")
    app = create_rest_app(lambda: plane, lambda: b"", 10_000, tracing=tracing)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as door:
        yield Scene(collector, door)
    await plane.stop()
    await reader.close()
    await asyncio.to_thread(tracing.stop)
    replica.__del__()
    gc.unfreeze()  # the replica froze all live objects, including this test's garbage


def build(settings: Settings, features: FeatureReader, llm: NearLlm) -> DataPlane:
    """Compose the data plane on real ports, with a student that needs no model and long timeouts."""
    items = FakeItemTopic()
    ports = Ports(
        bundles=BundleStore(settings.bundle_root),
        load_student=lambda *_: FakeStudent(),
        features=features,
        llms={DEFAULT_NAME: llm},
        events=TopicProducer(settings.kafka_address, TOPIC, 10.0, 10),
        impressions=FakeLog(),
        explanations=RedisExplanations(settings.redis_address, 60, settings.explain_max_bytes),
        receipts=RedisReceipts(settings.redis_address),
        page_key=RedisPageKey(settings.redis_address),
        user_data=no_user_data,
        live_items=items.live_items,
        item_reader=items,
        item_log=items,
        registry=CollectorRegistry(),
    )
    admission = AdmissionLimits(max_in_flight=256, max_delay_s=60.0)
    config = replace(CONFIG, admission=admission, feature_timeout_s=2.0, llm_rule=LlmRule(min_history=1))
    return build_data_plane(ports, config)


async def test_an_event_is_one_trace_up_to_its_row(scene: Scene) -> None:
    """Gateway, producer and worker form a parent chain of spans, and the worker's span links to the event's sender."""
    await scene.click(TRACE["click"])

    spans = await scene.arrived(TRACE["click"], "POST /v1/events", "send interactions", "process interactions", "write")

    door, sent, worked = (spans[name][1] for name in ("POST /v1/events", "send interactions", "process interactions"))
    assert {name: service for name, (service, _) in spans.items()} == {
        "POST /v1/events": "tailrace-gateway",
        "send interactions": "tailrace-gateway",
        **dict.fromkeys(("process interactions", "decode", "read", "apply", "write"), "tailrace-stream"),
    }
    assert (sent.parent_span_id, worked.parent_span_id) == (door.span_id, sent.span_id)
    assert [link.span_id for link in worked.links] == [sent.span_id]
    assert {spans[name][1].parent_span_id for name in ("decode", "read", "apply", "write")} == {worked.span_id}


async def test_a_request_is_one_trace_down_to_the_engine(scene: Scene) -> None:
    """Spans cover gateway, features, router, student, queue and prefill; the explanation has the same ID."""
    await scene.click(TRACE["click"])
    await scene.arrived(TRACE["click"], "write")

    answer = await scene.recommend(TRACE["read"])
    spans = await scene.arrived(TRACE["read"], "POST /v1/recommendations", "llm.rank", "queue", "prefill")

    above = {span.span_id: name for name, (_, span) in spans.items()}
    root = "POST /v1/recommendations"
    assert answer["tier"] == "llm"
    assert {name: above.get(span.parent_span_id) for name, (_, span) in spans.items()} == {
        root: None,
        **dict.fromkeys(("features", "route", "rank", "llm", "student", "answer"), root),
        "HMGET": "features",
        "llm.rank": "llm",
        "queue": "llm.rank",
        "prefill": "llm.rank",
    }
    assert spans["llm.rank"][0] == "tailrace-llm"
    get = partial(scene.door.get, f"/v1/explanations/{answer['request_id']}")
    explained = (
        await until_answer(get, lambda response: "sentences" in response.json())
    ).json()  # written in the background
    assert explained["trace_id"] == f"{TRACE['read']:032x}"
    assert explained["llm"]["num_prompt_tokens"] > 0
