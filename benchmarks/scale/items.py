"""The axis `items`: `python -m benchmarks.scale.items SIZE` prints its row.

The student's path of one request over a catalogue of SIZE items, without doors and store: masks, the student in its
served size (as the pipeline exports it: clustered_student.py), the selection and the answer. `student_ms` is the median
of the ranking only, `student_mb` the process memory for loading and running the student, `recall` the fraction of the
exact top ten in the answers.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.scale.row import catalogue_of, print_fields, times
from models.similar import empty_table
from services.contracts.access import ANYONE
from services.contracts.features import UserFeatures
from services.contracts.recommend import RecommendRequest
from services.gateway.ranking import as_items, choose
from services.gateway.request.context import FeatureLookup, StageTimer, build_context
from services.gateway.request.live_bundle import Live
from services.gateway.surfaces.surface import NO_SURFACE
from services.gateway.tiers.student import StudentTier
from services.items.expression import Expressions
from services.items.live_items import LiveItems
from services.router.deadline import DeadlineLimits, deadline_from
from services.student.ranker import StudentRanker

_NUM_WARM = 20
_LIMITS = DeadlineLimits(default_ms=1_000, min_ms=5, max_ms=5_000, reserve_ms=8.0)


def main(num_items: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "benchmarks.scale.clustered_student", str(num_items), folder], check=True)
        catalogue = catalogue_of(num_items)
        catalogue.index_of  # noqa: B018 - fills the cached property
        before_mb = _resident_mb()
        items = LiveItems().lay(catalogue)
        live = Live(
            name="default",
            version="v",
            catalogue=catalogue,
            student=StudentRanker(Path(folder) / "student.onnx"),
            manifest={},
            items=items,
            expressions=Expressions(items),
            similar=empty_table(len(catalogue.item_ids)),
        )
        requests = np.load(Path(folder) / "requests.npz")
        answers = asyncio.run(_answer_all(live, requests["histories"]))[_NUM_WARM:]
        best = requests["top"][_NUM_WARM:]
        hits = [np.isin(top, answer.shown[:10]).mean() for top, answer in zip(best, answers, strict=True)]
        print_fields(
            **times([answer.wall_s for answer in answers], [answer.loop_s for answer in answers]),
            student_ms=float(np.median([answer.student_ms for answer in answers])),
            student_mb=_resident_mb() - before_mb,
            recall=float(np.mean(hits)),
        )


@dataclass(frozen=True, slots=True)
class _Answered:
    """The time of a request, of the loop's thread for it and of its ranking, and the items shown."""

    wall_s: float
    loop_s: float
    student_ms: float
    shown: list[int]


async def _answer_all(live: Live, histories: np.ndarray) -> list[_Answered]:
    tier, answers = StudentTier(time.monotonic), []
    for number, indices in enumerate(histories.tolist()):
        history = tuple(live.catalogue.item_ids[index] for index in indices)
        features = FeatureLookup(UserFeatures(history_item_ids=history, num_events=len(history), as_of_us=1))
        request = RecommendRequest(request_id=f"r{number}", user_id="u", k=20, exclude_seen=True)
        started_s, worked_s, arrived_s = time.perf_counter(), time.thread_time(), time.monotonic()
        deadline, timer = deadline_from(arrived_s, None, _LIMITS), StageTimer(time.monotonic, arrived_s)
        compiled = live.expressions.compiled([])
        context = build_context(request, NO_SURFACE, ANYONE, deadline, live, features, timer, compiled)
        started = tier.rank(context)
        ranking = (await started if isinstance(started, asyncio.Task) else started).ranking
        rankings = () if ranking is None else (ranking,)
        chosen = choose(rankings, context.masks.showable, context.num_wanted, live.items.columns.available)
        num_items = len(as_items(chosen, live.items))
        wall_s, loop_s = time.perf_counter() - started_s, time.thread_time() - worked_s
        if num_items != context.num_wanted:
            raise SystemExit(f"error: {num_items} items instead of {context.num_wanted}")
        shown = [index for index, _, _ in chosen]
        answers.append(_Answered(wall_s, loop_s, context.stages.as_ms()["student"], shown))
    return answers


def _resident_mb() -> float:
    return float(psutil.Process().memory_info().rss / 2**20)


if __name__ == "__main__":
    main(int(sys.argv[1]))
