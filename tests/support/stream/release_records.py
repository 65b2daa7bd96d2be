"""Simulated traffic of a release stage, as gateways write it, with known truth for the analysis, and a broker."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from kafka import KafkaAdminClient, KafkaProducer

from models.registry.canary import Canary
from services.contracts.events import Impression, Interaction
from services.contracts.experiments import place_of
from services.contracts.recommend import Reason, Tier
from services.settings.kafka_clients import close_producer
from services.settings.kafka_topics import create_missing, wanted_topics
from services.settings.settings import Settings

_DEADLINE_MS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic of a stage, and the candidate's differences.

    Args:
        seconds: Duration.
        rate: Lists per second.
        num_users: Number of users; each list is for one user.
        clicks: Clicks per list of the control.
        click_factor: Factor on the candidate's clicks.
        latency_factor: Factor on the candidate's latency.
        failing: Fraction of the candidate's calls that fail.
    """

    seconds: int
    rate: float = 50.0
    num_users: int = 3_000
    clicks: float = 0.1
    click_factor: float = 1.0
    latency_factor: float = 1.0
    failing: float = 0.0


def recorded(traffic: Traffic, canary: Canary, live: str, seed: int) -> tuple[list[Impression], list[Interaction]]:
    """Return a stage's records: the lists in order of time, and the clicks, each some seconds after its list."""
    draw = np.random.default_rng(seed)
    num = round(traffic.rate * traffic.seconds)
    share = canary.stages[canary.stage].share
    users = [f"user-{number}" for number in range(traffic.num_users)]
    has_candidate = [place_of(canary.salt, user) < share for user in users]
    lists: list[Impression] = []
    clicks: list[Interaction] = []
    for number in range(num):
        user = int(draw.integers(traffic.num_users))
        is_new = has_candidate[user]
        shown_ms = canary.since_ms + round(1_000 * number / traffic.rate)
        fails = is_new and draw.random() < traffic.failing
        latency_ms = 20 * draw.lognormal(0, 0.4) * (traffic.latency_factor if is_new else 1.0)
        items = tuple(f"item-{number}" for number in draw.choice(200, 10, replace=False))
        impression = Impression(
            request_id=f"{canary.salt} {number}",
            user_id=users[user],
            shown_time_ms=shown_ms,
            item_ids=items,
            tier=Tier.POPULAR if fails else Tier.STUDENT,
            reason=Reason.STUDENT_FAILED if fails else Reason.SHORT_HISTORY,
            bundle_version=canary.version if is_new else live,
            history_len=1,
            history_digest="",
            elapsed_ms=round(latency_ms, 3),
            deadline_ms=_DEADLINE_MS,
        )
        lists.append(impression)
        if draw.random() < traffic.clicks * (traffic.click_factor if is_new else 1.0):
            clicks.append(
                Interaction(
                    event_id=f"click {impression.request_id}",
                    user_id=users[user],
                    item_id=items[0],
                    event_time_ms=shown_ms + int(draw.integers(500, 5_000)),
                    request_id=impression.request_id if draw.random() < 0.8 else None,
                )
            )
    return lists, clicks


def make_topics(settings: Settings) -> None:
    """Create the topics that gateways write."""
    admin = KafkaAdminClient(bootstrap_servers=settings.kafka_bootstrap)
    create_missing(admin, wanted_topics(settings))
    admin.close()


def send(settings: Settings, lists: Iterable[Impression], clicks: Iterable[Interaction]) -> None:
    """Write the records to their topics, and wait until the broker has them."""
    producer = KafkaProducer(bootstrap_servers=settings.kafka_bootstrap, max_block_ms=10_000, linger_ms=20)
    receipts = []
    for topic, records in ((settings.impressions_topic, lists), (settings.interactions_topic, clicks)):
        receipts += [producer.send(topic, key=record.key, value=record.encode()) for record in records]
    for receipt in receipts:
        receipt.get(30)
    close_producer(producer, 5.0)
