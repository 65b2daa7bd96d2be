"""Train, distill, evaluate and assemble on a small ring of items."""

import numpy as np
import pytest

from pipelines.data.examples import Split, read_cases
from pipelines.evaluation.evaluate import read_report
from pipelines.publication.bundle import version_of
from services.student.ranker import StudentRanker
from tests.unit.pipelines.conftest import MADE_AT, Built


def test_both_models_learn_the_ring(built: Built) -> None:
    """Decoder and student predict the next item, popularity does not; the report has baselines and the twin."""
    report = read_report(built.evaluated)
    ndcg = {name: metrics["ndcg@10"] for name, metrics in report["metrics"].items()}

    baselines = ["popularity", "bigram", "item_knn", "transitions", "unlearned"]
    assert [name for name in ndcg if not name.startswith("mixed_")] == [*baselines, "twin", "student", "decoder"]
    assert min(ndcg["decoder"], ndcg["student"]) > 0.8
    assert ndcg["popularity"] < 0.4
    assert report["student_share"] == pytest.approx(ndcg["student"] / ndcg["decoder"])
    assert report["num_test_users"] == 40


def test_bundle_holds_what_the_registry_wants_and_its_student_ranks_as_evaluated(built: Built) -> None:
    """The assembled folder is complete, and its student ranks like the evaluated student."""
    bundle = built.assembled / "bundle"
    files = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}

    report, cases = read_report(bundle), read_cases(built.trained.tokenized, Split.TEST)
    ranker = StudentRanker(bundle / "student.onnx")
    unseen = [~np.isin(np.arange(30), history) for history in cases.histories]
    firsts = [ranker.rank(h.tolist(), mask, 1)[0][0] for h, mask in zip(cases.histories, unseen, strict=True)]
    hits = (np.array(firsts) == cases.targets).mean()
    decoder = {"decoder/config.json", "decoder/model.safetensors", "wishes/reader.json"}
    folders = ("similar", "sources/transitions", "sources/text")
    tables = {f"{folder}/{name}" for folder in folders for name in ("neighbours.npy", "scores.npy")}
    assert files == decoder | tables | {"student.onnx", "student.safetensors", "catalogue.parquet", "report.json"}
    assert report["student_serving"]["relative_error"] < 1e-4
    assert hits > 0.7


def test_version_names_time_and_content(built: Built) -> None:
    """Versions sort by time and depend on the content."""
    version = (built.assembled / "version.txt").read_text()

    assert version.startswith("20261121T120000Z-")
    assert version == version_of(built.assembled / "bundle", MADE_AT)
    assert version_of(built.trained.decoder_dir, MADE_AT) != version
