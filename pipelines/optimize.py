"""Stage 7: the student takes the form in which it is served, and it is proven to answer as the one that was judged.

    student.onnx     pipelines/student_graph
    serving.json     how far its scores are from the judged ones, and how long one ranking takes here

The decoder needs no stage of its own: it is served from the checkpoint that was judged.
"""

import json
import time
from pathlib import Path

import numpy as np
import onnx

from models.student import read_student
from pipelines.examples import Cases, read_cases
from pipelines.split import Split
from pipelines.student_graph import student_graph
from pipelines.student_scorer import StudentScorer
from services.errors import StageFailed
from services.student.ranker import StudentRanker

_MAX_RELATIVE_ERROR = 1e-4
_NUM_COMPARED = 200
_NUM_TIMED = 500


def optimize(tokenized: Path, students_dir: Path, out: Path) -> None:
    """Export, compare on test histories, time. Raises StageFailed when the exported student answers otherwise."""
    student = read_student(students_dir / "student.safetensors")
    onnx.save(student_graph(student), out / "student.onnx")
    ranker, cases = StudentRanker(out / "student.onnx"), read_cases(tokenized, Split.TEST)
    error = relative_error(StudentScorer(student), ranker, cases)
    if error > _MAX_RELATIVE_ERROR:
        raise StageFailed("optimize", f"the exported student's scores differ by {error:.1e} of their range")
    about = {"relative_error": error, **time_ranking(ranker, cases, student.config.num_items)}
    (out / "serving.json").write_text(json.dumps(about, indent=1))


def relative_error(judged: StudentScorer, served: StudentRanker, cases: Cases) -> float:
    """Give the largest difference between the two over some cases, as a share of the scores' range."""
    histories = cases.histories[:_NUM_COMPARED]
    wanted = judged(histories)
    found = np.stack([served.score(history.tolist()) for history in histories])
    return float(np.abs(wanted - found).max() / (wanted.max() - wanted.min()))


def time_ranking(ranker: StudentRanker, cases: Cases, num_items: int) -> dict[str, float]:
    """Measure one ranking after another on one thread, in milliseconds."""
    everything = np.ones(num_items, dtype=bool)
    spent_ms = []
    for turn in range(_NUM_TIMED):
        history = cases.histories[turn % len(cases)].tolist()
        began = time.perf_counter()
        ranker.rank(history, everything, 10)
        spent_ms.append((time.perf_counter() - began) * 1_000)
    return {"rank_p50_ms": float(np.percentile(spent_ms, 50)), "rank_p99_ms": float(np.percentile(spent_ms, 99))}
