"""The gate: which models may be published."""

import pytest

from pipelines.evaluation.gate import GateOptions, check
from services.errors import StageFailed


def metrics(decoder: float, student: float, item_knn: float = 0.09) -> dict[str, dict[str, float]]:
    """An evaluation with these NDCGs."""
    found = {"decoder": decoder, "student": student, "item_knn": item_knn}
    return {name: {"ndcg@10": value} for name, value in found.items()}


def test_good_models_pass() -> None:
    """Both beat the baseline, the student with 95 % of the decoder or more."""
    for student in (0.12, 0.114, 0.2):
        check(metrics(0.12, student), GateOptions())


@pytest.mark.parametrize(
    ("decoder", "student", "complaint"),
    [
        (0.08, 0.1, "the decoder's ndcg@10 of 0.0800 does not beat item_knn's 0.0900"),
        (0.12, 0.113, r"94\.2% of the decoder's 0\.1200, under 95%"),
        (0.092, 0.0899, "the student's ndcg@10 of 0.0899 does not beat item_knn's"),
        (0.0, 0.0, "does not beat item_knn"),
    ],
)
def test_bad_models_are_stopped_with_the_reason(decoder: float, student: float, complaint: str) -> None:
    """The message names the number that is too low, and that nothing was published."""
    with pytest.raises(StageFailed, match=complaint) as stopped:
        check(metrics(decoder, student), GateOptions())

    assert "nothing was published" in str(stopped.value)


def test_good_models_of_doubtful_data_are_stopped() -> None:
    """What the checks of the data found stops the publication by itself."""
    with pytest.raises(StageFailed, match="too few events; nothing was published"):
        check(metrics(0.12, 0.12), GateOptions(), ["too few events"])
