"""Assembles the bundle from trained models, verifies the exported student against the trained one, and publishes it.

    bundle/          files listed in models/registry/store.py: decoder/, student.onnx and student_table/,
                     student.safetensors, catalogue.parquet, report.json, similar/, sources/, wishes/,
                     code_book.safetensors for codes deeper than 1, sids.json for codes of an index, teacher/ if their
                     decoder had a teacher, and item_text.safetensors if rows are learned from text; publication adds
                     report.md (model_card)
    version.txt      the bundle's name: its creation time (UTC) and a hash of its content

The decoder is served from the checkpoint written by training. The report contains the evaluation of the judged pair,
the findings of a refit, the time of one ranking by the exported student on this machine, and the difference of its
scores from the trained student's or, for a large catalogue, its recall of the exact top ten.
"""

import json
import shutil
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from models.mixer import SOURCES
from models.registry.bundle import JUDGED, Bundle, hashes
from models.registry.store import BundleStore, Seen
from models.similar import SIMILAR
from models.student import read_student
from models.wishes.mixing import WISHES
from pipelines.codes.code_book import CODE_BOOK
from pipelines.data.examples import Cases, Split, read_cases
from pipelines.evaluation.evaluate import REPORT, EvaluatedModels, read_report
from pipelines.evaluation.pair import save_pair
from pipelines.foreign.tokens import SIDS
from pipelines.publication.refit import read_found
from pipelines.publication.student_table import GRAPH, export_student
from pipelines.runner.stage import content_key
from pipelines.scoring.student import StudentScorer
from pipelines.similarity.mix import read_found as read_mix
from pipelines.wishes.make_reader import read_found as read_reader
from services.errors import StageFailed
from services.student.ranker import StudentRanker

BY = "pipeline"
"""Actor under which a publication promotes its bundle."""
_MAX_RELATIVE_ERROR = 1e-4
_NUM_COMPARED = 200
_NUM_TIMED = 500


def assemble(
    trained: EvaluatedModels,
    evaluated: Path,
    similar: Path,
    wishes: Path,
    made_at: datetime,
    out: Path,
    judged: EvaluatedModels | None = None,
) -> None:
    """Assemble the bundle of the serving pair, with the judged pair included if the serving pair was refitted from it.

    Raises StageFailed if the exported student's scores differ from the trained student's.
    """
    bundle = out / "bundle"
    save_pair(trained, bundle)
    if judged is not None:
        save_pair(judged, bundle / JUDGED)
    shutil.copytree(similar / SIMILAR, bundle / SIMILAR)
    shutil.copytree(similar, bundle / SOURCES, ignore=shutil.ignore_patterns(SIMILAR, "*.json"))
    shutil.copytree(wishes / WISHES, bundle / WISHES)
    for name in (CODE_BOOK, SIDS):
        if (trained.tokenized / name).exists():
            shutil.copyfile(trained.tokenized / name, bundle / name)
    student, cases = (
        read_student(trained.students_dir / "student.safetensors"),
        read_cases(trained.tokenized, Split.VALID),
    )
    table = export_student(student, cases.histories, bundle)
    ranker = StudentRanker(bundle / GRAPH)
    if table is None:
        error = relative_error(StudentScorer(student), ranker, cases)
        if not error <= _MAX_RELATIVE_ERROR:  # which no NaN is
            raise StageFailed("assemble", f"the exported student's scores differ by {error:.1e} of their range")
        serving: dict[str, float] = {"relative_error": error}
    else:
        serving = {"recall@10": table.recall, "num_scored": table.num_scored}
    serving |= time_ranking(ranker, cases, student.config.num_items)
    refitted = read_found(trained.students_dir) if judged is not None else None
    report = read_report(evaluated) | {"student_serving": serving, "refit": refitted}
    report |= {"similar": read_mix(similar), "wishes": read_reader(wishes)}
    (bundle / REPORT).write_text(json.dumps(report, indent=1))
    (out / "version.txt").write_text(version_of(bundle, made_at))


def version_of(bundle: Path, made_at: datetime) -> str:
    """Return a bundle's name: it sorts by time, and the content hash separates two bundles of one second."""
    return f"{made_at:%Y%m%dT%H%M%SZ}-{content_key(hashes(bundle))[:8]}"


def relative_error(evaluated: StudentScorer, served: StudentRanker, cases: Cases) -> float:
    """Return the largest score difference between the two over some cases, as a fraction of the scores' range."""
    histories = cases.histories[:_NUM_COMPARED]
    expected = evaluated(histories)
    actual = np.stack([served.score(history.tolist()) for history in histories])
    return float(np.abs(expected - actual).max() / (expected.max() - expected.min()))


def time_ranking(ranker: StudentRanker, cases: Cases, num_items: int) -> dict[str, float]:
    """Measure rankings one after another on one thread, in milliseconds."""
    everything = np.ones(num_items, dtype=bool)
    spent_ms = []
    for repeat in range(_NUM_TIMED):
        history = cases.histories[repeat % len(cases)].tolist()
        began = time.perf_counter()
        ranker.rank(history, everything, 10)
        spent_ms.append((time.perf_counter() - began) * 1_000)
    return {"rank_p50_ms": float(np.percentile(spent_ms, 50)), "rank_p99_ms": float(np.percentile(spent_ms, 99))}


def publish(
    store: BundleStore,
    folder: Path,
    version: str,
    about: dict[str, Any],
    pages: Mapping[str, str] | None = None,
    seen: str | Seen | None = Seen.NOW,
    *,
    force: bool = False,
) -> Bundle:
    """Publish the folder, with these pages by file name, under this version and promote it.

    An existing version is only promoted. Raises BundleMoved if `seen`, the live version at the start of the run, is no
    longer live, and BundleWithdrawn for a withdrawn version without `force`.
    """
    if not force:
        store.refuse_withdrawn(version, folder, about)
    bundle = store.publish(folder, version, about, pages)
    store.promote(version, seen, by=BY, force=force)
    return bundle
