"""Serving a large catalogue's student with a table: creation, recall on real histories, and new items."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from models.student import Hop, StudentModel, read_student
from pipelines.codes.options import CodesOptions
from pipelines.data.examples import Split, read_cases
from pipelines.evaluation.evaluate import read_report
from pipelines.publication import student_table
from pipelines.publication.add_items import append_items
from pipelines.publication.bundle import assemble
from pipelines.scoring.student import StudentScorer
from pipelines.tables.files import Frame
from pipelines.tables.reader import ItemTable
from services.errors import BundleCorrupt
from services.student.ranker import StudentRanker, load_student
from services.student.table import TABLE, load_table
from tests.support.training.bundles import live_store
from tests.support.training.students import random_student
from tests.unit.pipelines.conftest import MADE_AT, SMALL_DECODER, Built, learn_the_ring


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a table for the ring's thirty items with few scored rows."""
    monkeypatch.setattr(student_table, "MAX_SCORED_WHOLE", 10)
    monkeypatch.setattr(student_table, "_LEAST_SCORED", 4)


def test_a_table_finds_the_trained_students_top_ten(built: Built, tmp_path: Path) -> None:
    """Report and table name the measured recall of the trained student's ten best items, at least 97 %."""
    assemble(built.trained, built.evaluated, built.similar, built.wishes, MADE_AT, tmp_path)
    bundle = tmp_path / "bundle"

    ranker, cases = StudentRanker(bundle / "student.onnx"), read_cases(built.trained.tokenized, Split.VALID)
    scores = StudentScorer(read_student(bundle / "student.safetensors"))(cases.histories)
    shares = []
    for history, scores_V in zip(cases.histories, scores, strict=True):
        allowed = ~np.isin(np.arange(30), history)
        best = np.argsort(-np.where(allowed, scores_V, -np.inf), kind="stable")[:10]
        shares.append(np.isin(best, ranker.rank(history.tolist(), allowed, 10)[0]).mean())
    serving, table = read_report(bundle)["student_serving"], load_table(bundle / TABLE)
    assert (serving["recall@10"], serving["num_scored"]) == (table.recall, table.num_scored)
    assert np.mean(shares) == pytest.approx(table.recall)
    assert table.recall >= 0.97
    np.testing.assert_allclose(
        ranker.score(cases.histories[0].tolist()), scores[0], atol=0.02 * (scores[0].max() - scores[0].min())
    )


@pytest.fixture
def clustered() -> tuple[StudentModel, list[np.ndarray]]:
    """A student with 2,000 items in forty clusters, and sixty histories whose states are near their items."""
    rng = np.random.default_rng(0)
    student = random_student(num_items=2_000)
    rows_VD = np.repeat(2 * rng.standard_normal((40, 16)), 50, axis=0) + rng.standard_normal((2_000, 16))
    with torch.no_grad():
        student.embedding.weight[1:] = torch.from_numpy(rows_VD)
        student.norm.weight.fill_(1.0)
        for hop in student.hops:
            assert isinstance(hop, Hop)
            hop.output.weight *= 0.01
            hop.down.weight *= 0.01
    return student, [rng.integers(0, 2_000, 8) for _ in range(60)]


def test_fewer_rows_suffice_where_items_are_in_cells(clustered, tmp_path: Path) -> None:
    """The search scores a part of a clustered catalogue, and a long list is still complete."""
    table = student_table.export_student(*clustered, tmp_path)

    assert table is not None
    assert table.recall >= 0.97
    assert table.num_scored < 1_000
    indices, _ = StudentRanker(tmp_path / "student.onnx").rank([1, 2], np.ones(2_000, dtype=bool), 1_500)
    assert len(set(indices.tolist())) == 1_500


def test_where_all_rows_find_less_than_the_aim_as_much_is_found_but_a_margin(clustered, tmp_path, monkeypatch) -> None:
    """If the target recall is unreachable, the fewest rows within a margin of full scoring are used."""
    monkeypatch.setattr(student_table, "_AIM", 1.1)
    student, histories = clustered

    table = student_table.export_student(student, histories, tmp_path)

    assert table is not None
    everything = replace(table, num_scored=2_000)
    ranker, lists = StudentRanker(tmp_path / "student.onnx"), []
    for history in histories:
        allowed = ~np.isin(np.arange(2_000), history)
        lists.append(everything.best(ranker.state(history.tolist()), allowed, 10)[0])
    assert student_table.recall(lists, student_table.exact_top(student, histories)) - table.recall <= 0.005
    assert table.num_scored < 2_000


def test_a_table_that_finds_too_little_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too little recall, the exported graph scores all items exactly."""
    monkeypatch.setattr(student_table, "_LEAST", 1.1)

    table = student_table.export_student(random_student(), [np.array([1, 2, 3])], tmp_path)

    assert table is None
    assert [path.name for path in tmp_path.iterdir()] == ["student.onnx"]
    assert len(StudentRanker(tmp_path / "student.onnx").score([1, 2])) == 30


def test_a_new_item_joins_the_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An item appended to a bundle enters the table by its codes and can be returned; a corrupt table is rejected."""
    monkeypatch.setattr(student_table, "_LEAST", 0.0)  # two epochs leave almost equal scores
    shorter = replace(SMALL_DECODER, fit=replace(SMALL_DECODER.fit, epochs=2, validate_every=2))
    bundle = learn_the_ring(tmp_path, shorter, CodesOptions(depth=3)).assembled / "bundle"
    before, store = load_table(bundle / TABLE), live_store(tmp_path / "bundles", bundle, "first", {"num_items": 30})

    live, _ = append_items(
        store, ItemTable(Frame(pl.DataFrame({"item_id": ["a-new"], "title": ["Item a-new"]}), "items")), MADE_AT
    )

    now, table = live.catalogue(), load_table(live.path / TABLE)
    ranker, only = load_student(live, now), np.zeros(31, dtype=bool)
    only[now.index_of["a-new"]] = True
    wanted = StudentScorer(read_student(live.path / "student.safetensors"))([np.array([3, 4])])[0]
    assert (len(table.items_V), table.num_scored, table.recall) == (31, before.num_scored, before.recall)
    assert len(table.centroids_CD) <= len(before.centroids_CD)
    assert ranker.rank([3, 4], only, 5)[0].tolist() == [now.index_of["a-new"]]
    np.testing.assert_allclose(ranker.score([3, 4]), wanted, atol=0.02 * (wanted.max() - wanted.min()))
    with (live.path / TABLE / "rows.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    with pytest.raises(BundleCorrupt, match=rf"{TABLE}/rows\.npy: hash differs"):
        load_student(live, now)
