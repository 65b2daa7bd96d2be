"""The axis `items`: `python -m benchmarks.scale.items SIZE` prints its row.

The student's path of one request over a catalogue of SIZE items, without doors and store: masks, the student with random weights in its
served size, the selection and the answer.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import torch

from benchmarks.scale.row import catalogue_of, print_row
from models.student import StudentConfig, StudentModel
from pipelines.publication.student_graph import student_graph
from services.contracts.access import ANYONE
from services.contracts.features import UserFeatures
from services.contracts.recommend import RecommendRequest
from services.gateway.request.candidates import as_items, choose
from services.gateway.request.context import FeatureLookup, RequestContext, StageTimer, build_context
from services.gateway.request.live_bundle import Live
from services.gateway.tiers.student import StudentTier
from services.router.deadline import DeadlineLimits, deadline_from
from services.student.ranker import StudentRanker

_NUM_REQUESTS, _NUM_WARM = 200, 20
_LIMITS = DeadlineLimits(default_ms=1_000, min_ms=5, max_ms=5_000, reserve_ms=8.0)


def main(num_items: int) -> None:
    """Answer requests one after another."""
    live = _live(num_items)
    wall_s, loop_s = asyncio.run(_answer_all(live))
    print_row("items", num_items, wall_s[_NUM_WARM:], loop_s[_NUM_WARM:])


async def _answer_all(live: Live) -> tuple[list[float], list[float]]:
    tier, rng = StudentTier(time.monotonic), np.random.default_rng(0)
    wall_s, loop_s = [], []
    for number in range(_NUM_REQUESTS):
        history = tuple(live.catalogue.item_ids[index] for index in rng.integers(0, len(live.catalogue.item_ids), 50))
        started_s, worked_s = time.perf_counter(), time.thread_time()
        await _answer(
            tier, live, RecommendRequest(request_id=f"r{number}", user_id="u", k=20, exclude_seen=True), history
        )
        wall_s.append(time.perf_counter() - started_s)
        loop_s.append(time.thread_time() - worked_s)
    return wall_s, loop_s


async def _answer(tier: StudentTier, live: Live, request: RecommendRequest, history: tuple[str, ...]) -> None:
    arrived_s = time.monotonic()
    context = build_context(
        request,
        ANYONE,
        deadline_from(arrived_s, None, _LIMITS),
        live,
        FeatureLookup(UserFeatures(history_item_ids=history, num_events=len(history), as_of_us=1)),
        StageTimer(time.monotonic, arrived_s),
    )
    _check(context, await _ranked(tier, context))


async def _ranked(tier: StudentTier, context: RequestContext) -> int:
    started = tier.rank(context)
    result = await started if isinstance(started, asyncio.Task) else started
    rankings = () if result.ranking is None else (result.ranking,)
    return len(as_items(choose(rankings, context.masks.showable, context.num_wanted), context.live.catalogue))


def _check(context: RequestContext, num_shown: int) -> None:
    if num_shown != context.num_wanted:
        raise SystemExit(f"error: {num_shown} items instead of {context.num_wanted}")


def _live(num_items: int) -> Live:
    catalogue = catalogue_of(num_items)
    catalogue.index_of  # noqa: B018 - fills the cached property
    config = StudentConfig(
        num_items=num_items, hidden_size=64, feed_forward=128, num_heads=4, num_hops=2, max_items=200
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "student.onnx"
        onnx.save(student_graph(StudentModel(config).eval()), path)
        return Live("v", catalogue, StudentRanker(path), {})


if __name__ == "__main__":
    main(int(sys.argv[1]))
