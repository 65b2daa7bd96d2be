"""The served student scores and ranks like the trained student."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.mixer import Added, softmax
from models.registry.bundle import Bundle
from models.student import START, StudentModel
from pipelines.publication.student_graph import student_graph
from services.errors import BundleCorrupt
from services.student.ranker import StudentRanker, load_student
from tests.support.training.bundles import build_catalogue
from tests.support.training.students import random_student

NUM_ITEMS, MAX_ITEMS = 30, 12
EVERYTHING = np.ones(NUM_ITEMS, dtype=bool)


@pytest.fixture(scope="module")
def student() -> StudentModel:
    return random_student()


@pytest.fixture(scope="module")
def ranker(student: StudentModel, tmp_path_factory: pytest.TempPathFactory) -> StudentRanker:
    """The same student as served."""
    path = tmp_path_factory.mktemp("student") / "student.onnx"
    onnx.save(student_graph(student), path)
    return StudentRanker(path)


@settings(max_examples=40)
@given(history=st.lists(st.integers(0, NUM_ITEMS - 1), max_size=2 * MAX_ITEMS))
def test_served_scores_are_the_trained_model_s(student, ranker, history: list[int]) -> None:
    """For any history, the served graph equals torch up to rounding.

    The graph computes only the newest position, in another order. In fp32, torch itself differs by up to 1e-4 from fp64
    here; scores are up to 18.
    """
    exact, rows = deepcopy(student).double(), torch.tensor([[START, *(item + 1 for item in history[-MAX_ITEMS:])]])
    with torch.no_grad():
        wanted = (exact(rows)[0, -1] @ exact.head_weight_VD.T).numpy()

    np.testing.assert_allclose(ranker.score(history), wanted, rtol=1e-4, atol=1e-3)


@given(
    allowed=st.lists(st.booleans(), min_size=NUM_ITEMS, max_size=NUM_ITEMS).map(np.array), k=st.integers(1, NUM_ITEMS)
)
@example(allowed=~EVERYTHING, k=5)
@settings(max_examples=40)
def test_ranking_is_the_allowed_scores_in_order(ranker: StudentRanker, allowed: np.ndarray, k: int) -> None:
    """The ranking equals a full sort: best first, only allowed items, at most k."""
    scores = ranker.score([1, 2, 3])
    wanted = [index for index in np.lexsort((np.arange(NUM_ITEMS), -scores)) if allowed[index]][:k]

    indices, ranked = ranker.rank([1, 2, 3], allowed, k)

    assert indices.tolist() == wanted
    np.testing.assert_array_equal(ranked, scores[wanted])


@given(history=st.lists(st.integers(0, NUM_ITEMS - 1), min_size=1, max_size=5), weight=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=20)
def test_a_mixed_ranking_is_the_weighted_sum_in_order(ranker: StudentRanker, history: list[int], weight: float) -> None:
    """The mix adds the sources to the student's probabilities; with weight 0 only their items come back."""
    added = Added(np.array([3, 7, 3]), np.array([0.2, 0.05, 0.1]), weight)
    sums = weight * softmax(ranker.score(history)) + np.bincount(added.items, added.scores, minlength=NUM_ITEMS)
    wanted = [index for index in np.lexsort((np.arange(NUM_ITEMS), -sums)) if sums[index] > 0][:8]

    indices, scores = ranker.rank(history, EVERYTHING, 8, added)

    assert indices.tolist() == wanted
    np.testing.assert_allclose(scores, np.log(sums[wanted]), rtol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_ties_go_to_the_smaller_index(tmp_path: Path, k: int) -> None:
    """Items with equal scores are in index order, also at the end of the list."""
    flat = random_student()
    with torch.no_grad():
        flat.embedding.weight[1:] = flat.embedding.weight[1]
    onnx.save(student_graph(flat), tmp_path / "flat.onnx")
    allowed = EVERYTHING.copy()
    allowed[1] = False

    indices, _ = StudentRanker(tmp_path / "flat.onnx").rank([3], allowed, k)

    assert indices.tolist() == [0, 2, 3, 4, 5][:k]


@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_file_that_is_no_student_is_refused(tmp_path: Path, content: bytes) -> None:
    """A broken file is a corrupt bundle, rejected at loading."""
    (tmp_path / "student.onnx").write_bytes(content)

    with pytest.raises(BundleCorrupt, match="not a student"):
        StudentRanker(tmp_path / "student.onnx")


def test_student_of_another_catalogue_is_refused(tmp_path: Path) -> None:
    """A bundle's student must rank its catalogue."""
    onnx.save(student_graph(random_student(num_items=7)), tmp_path / "student.onnx")

    with pytest.raises(BundleCorrupt, match="scores 7 items, the catalogue has 30"):
        load_student(Bundle("v", tmp_path, {"files": {}}), build_catalogue(30))


def test_a_process_that_ranks_keeps_no_telemetry(student: StudentModel, tmp_path: Path) -> None:
    """ONNX Runtime, which sends telemetry by default, creates no device id and no event queue."""
    home, path = tmp_path / "home", tmp_path / "student.onnx"
    home.mkdir()
    onnx.save(student_graph(student), path)
    code = (
        "import sys; from pathlib import Path; from services.student.ranker import StudentRanker; "
        "StudentRanker(Path(sys.argv[1])).score([])"
    )
    # without the variables of CI and pytest, which silence the library
    bare = {"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    bare["PYTHONPATH"] = ":".join(filter(None, sys.path))

    subprocess.run([sys.executable, "-c", code, str(path)], env=bare, check=True)

    assert list(home.rglob("*")) == []
