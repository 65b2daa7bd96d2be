"""The item table ranks like an exhaustive search over the scored rows, and rejects inconsistent files."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.publication.student_graph import state_graph
from pipelines.publication.student_table import laid_out
from services.errors import BundleCorrupt
from services.student.ranker import StudentRanker
from services.student.table import TABLE, ItemEmbeddings, load_table
from tests.support.training.students import random_student

SIZE = 8


def build_table(num_items: int = 50, num_cells: int = 7, seed: int = 0, num_values: int = 100) -> ItemEmbeddings:
    """Return a table of random rows; fewer `num_values` give more equal rows."""
    rng = np.random.default_rng(seed)
    values_WD = rng.standard_normal((num_values, SIZE)).astype(np.float32)
    rows_VD = values_WD[rng.integers(0, num_values, num_items)]
    return laid_out(rows_VD, np.eye(SIZE, dtype=np.float32), values_WD[:num_cells])


def exhaustive(table: ItemEmbeddings, state_D: np.ndarray, allowed_V: np.ndarray) -> list[tuple[float, int]]:
    """Score every allowed item with unbounded integers and return (score, item), best first, ties by index."""
    step = np.float32(np.abs(state_D).max() / ((2**24 - 1) // (127 * SIZE)))
    whole_D = [int(value) for value in np.rint(state_D / step)]
    centres_C, scored = [float(np.vecdot(one_D, state_D)) for one_D in table.centroids_CD], []
    for row, item in enumerate(table.items_V.tolist()):
        if allowed_V[item]:
            dot = sum(int(code) * other for code, other in zip(table.rows_VD[row], whole_D, strict=True))
            cell = int(np.searchsorted(table.starts_C, row, side="right")) - 1
            scored.append((-float(np.float32(centres_C[cell]) + np.float32(dot) * (table.scales_V[row] * step)), item))
    return [(-negative, item) for negative, item in sorted(scored)]


@st.composite
def searches(draw: st.DrawFn) -> tuple[ItemEmbeddings, np.ndarray, np.ndarray, int]:
    """Generate a table, a state, a mask and a list length."""
    seed, num_items = draw(st.integers(0, 1_000)), draw(st.integers(1, 60))
    built = build_table(num_items, draw(st.integers(1, 9)), seed, draw(st.sampled_from([9, 20, 100])))
    rng = np.random.default_rng(seed)
    mask = rng.random(num_items) < draw(st.sampled_from([0.0, 0.1, 0.6, 0.95, 1.0]))
    table = replace(built, num_scored=draw(st.integers(1, 20)))
    return table, rng.standard_normal(SIZE).astype(np.float32), mask, draw(st.integers(0, 12))


@given(search=searches())
def test_a_list_is_in_the_exhaustive_order_and_short_only_where_few_are_allowed(search) -> None:
    """The list has min(k, allowed) items in exhaustive order, and equals the exhaustive list if few are allowed."""
    table, state_D, allowed_V, k = search
    indices, scores = table.best(state_D, allowed_V, k)

    order = exhaustive(table, state_D, allowed_V)
    listed = list(zip(scores.tolist(), indices.tolist(), strict=True))
    num_scored = max(table.num_scored, k)
    assert len(listed) == min(k, len(order))
    assert listed == [pair for pair in order if pair in set(listed)]
    if len(order) <= 4 * num_scored:
        assert listed == order[:k]


def build_distant_groups(num_scored: int) -> tuple[ItemEmbeddings, np.ndarray]:
    """Return a table of twenty distant groups of a hundred items, and the groups' centres."""
    rng = np.random.default_rng(0)
    centres_CD = rng.standard_normal((20, SIZE)).astype(np.float32)
    centres_CD *= 100 / np.linalg.norm(centres_CD, axis=1, keepdims=True)
    rows_VD = np.repeat(centres_CD, 100, axis=0) + rng.standard_normal((2_000, SIZE)).astype(np.float32)
    return replace(laid_out(rows_VD, np.eye(SIZE, dtype=np.float32), centres_CD), num_scored=num_scored), centres_CD


def test_the_best_cells_are_scored_alone() -> None:
    """For distant cells a few rows suffice, and the leading directions of the centroids select the cells."""
    table, centres_CD = build_distant_groups(100)
    mistaken, everything = replace(table, leading_CN=-table.leading_CN), np.ones(2_000, dtype=bool)

    indices, _ = table.best(centres_CD[3], everything, 10)
    others, _ = mistaken.best(centres_CD[3], everything, 10)

    assert set(indices // 100) == {3}
    assert 3 not in set(others // 100)


def test_a_filter_that_hides_the_near_cells_leads_to_the_next_ones() -> None:
    """The best allowed items are found however far they are, also if only a few of the best are hidden."""
    table, centres_CD = build_distant_groups(100)
    state_D = centres_CD[3]
    far = np.repeat(np.argsort(np.argsort(-(centres_CD @ state_D))) >= 12, 100)
    order = [item for _, item in exhaustive(table, state_D, np.ones(2_000, dtype=bool))]
    few_hidden = np.ones(2_000, dtype=bool)
    few_hidden[order[:7]] = False

    assert table.best(state_D, far, 10)[0].tolist() == [item for item in order if far[item]][:10]
    assert table.best(state_D, few_hidden, 10)[0].tolist() == order[7:17]


def test_rows_are_the_embeddings_within_half_a_step() -> None:
    """Each value is within half of its row's scale, for any row norm and number of cells."""
    rng = np.random.default_rng(0)
    rows_VD = (rng.standard_normal((40, SIZE)) * rng.pareto(1, (40, 1))).astype(np.float32)
    rows_VD[7] = 0
    for num_cells in (1, 5, 40):
        table = laid_out(rows_VD, np.eye(SIZE, dtype=np.float32), rows_VD[:num_cells])

        read_VD = table.embedded(np.arange(40))

        errors_V = np.abs(read_VD - rows_VD).max(axis=1)
        assert (errors_V <= 0.501 * table.scales_V[table.row_of_V] + 1e-5).all()
        np.testing.assert_allclose(table.score(rows_VD[3]), read_VD @ rows_VD[3], rtol=1e-3, atol=1e-3)


def test_what_is_saved_is_mapped(tmp_path: Path) -> None:
    """Arrays and search settings are read back, and the arrays are memory-mapped."""
    table = replace(build_table(), num_scored=12, recall=0.98)
    table.save(tmp_path / TABLE)

    read = load_table(tmp_path / TABLE)

    assert (read.num_scored, read.recall) == (12, 0.98)
    for name in ("rows_VD", "scales_V", "items_V", "starts_C", "centroids_CD", "metric_DD", "leading_CN", "radii_C"):
        np.testing.assert_array_equal(getattr(read, name), getattr(table, name))
        assert not getattr(read, name).flags.owndata


ARRAYS = ("rows", "scales", "items", "starts", "centroids", "metric", "leading", "radii")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *((f"{name}.npy", harm) for name in ARRAYS for harm in ("cut", "gone", np.zeros(3, dtype=np.int16))),
        ("scales.npy", np.zeros(49, dtype=np.float32)),
        ("items.npy", np.zeros(50, dtype=np.int32)),
        ("items.npy", np.arange(1, 51, dtype=np.int32)),
        ("starts.npy", np.array([0, 10, 5, 20, 30, 40, 45, 50], dtype=np.int64)),
        ("starts.npy", np.arange(8, dtype=np.int64)),
        ("centroids.npy", np.zeros((7, 3), dtype=np.float32)),
        ("metric.npy", np.zeros((3, 3), dtype=np.float32)),
        ("metric.npy", np.ones((SIZE, SIZE), dtype=np.float32)),
        ("metric.npy", np.full((SIZE, SIZE), np.nan, dtype=np.float32)),
        ("radii.npy", np.zeros(3, dtype=np.float32)),
        ("leading.npy", np.zeros((3, SIZE), dtype=np.float32)),
        ("leading.npy", np.zeros((7, SIZE + 1), dtype=np.float32)),
        *(("search.json", text) for text in ("", "[]", '{"num_scored": 3}', '{"num_scored": null, "recall@10": 1}')),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, name: str, harm: str | np.ndarray) -> None:
    """A truncated, missing or inconsistent file is a corrupt bundle, rejected at loading with its name."""
    build_table().save(tmp_path / TABLE)
    path = tmp_path / TABLE / name
    if isinstance(harm, np.ndarray):
        np.save(path, harm)
    elif harm == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if harm == "cut" else harm.encode())

    with pytest.raises(BundleCorrupt, match=re.escape(f"{TABLE}/{name}")):
        load_table(tmp_path / TABLE)


def test_a_table_of_another_student_is_refused(tmp_path: Path) -> None:
    """The graph reads the table's embeddings, so a missing table or another size is rejected."""
    onnx.save(state_graph(random_student()), tmp_path / "student.onnx")
    with pytest.raises(BundleCorrupt, match=rf"{TABLE}/rows\.npy: not an array"):
        StudentRanker(tmp_path / "student.onnx")
    build_table().save(tmp_path / TABLE)

    with pytest.raises(BundleCorrupt, match=rf"{TABLE}/rows\.npy: not the embeddings"):
        StudentRanker(tmp_path / "student.onnx")
