"""The gate: models that may be published."""

from typing import Any

import pytest

from pipelines.evaluation.gate import Compared, GateOptions, find_problems, refuse
from services.errors import StageFailed


def metrics(
    decoder: float, student: float, item_knn: float = 0.09, bigram: float = 0.05
) -> dict[str, dict[str, float]]:
    """Build an evaluation with these NDCGs."""
    values = {"decoder": decoder, "student": student, "item_knn": item_knn, "bigram": bigram, "popularity": 0.01}
    return {name: {"ndcg@10": value} for name, value in values.items()}


def row(low: float, high: float, version: str = "v1") -> dict[str, Any]:
    """Build the decoder's row against a champion with NDCG .1, from the interval of the difference."""
    means = {"champion_ndcg": 0.1, "challenger_ndcg": 0.1 + (low + high) / 2}
    return {"model": "decoder", "champion": version, "num_users": 500, **means, "low": low, "high": high}


def live(low: float, high: float) -> Compared:
    return Compared(live=[row(low, high)])


def reference(low: float, high: float) -> Compared:
    """Compare this row with the reference, and no difference with the live bundle."""
    return Compared(live=[row(0.0, 0.0)], reference=[row(low, high, "v0")])


def test_good_models_pass() -> None:
    """Models above their floors pass unless a loss exceeds 2 % of live beyond chance, or 5 % of the reference."""
    for student in (0.12, 0.091, 0.2):
        assert find_problems(metrics(0.12, student), Compared(), GateOptions()) == []
    for low, high in ((-0.03, 0.0), (-0.0038, -0.0001), (-0.01, 0.01), (0.01, 0.02)):
        assert find_problems(metrics(0.12, 0.12), live(low, high), GateOptions()) == []
    for low, high in ((-0.0049, -0.0049), (-0.02, 0.0102), (0.01, 0.02)):
        assert find_problems(metrics(0.12, 0.12), reference(low, high), GateOptions()) == []
    refuse([])


def test_a_model_is_judged_as_it_is_served_on_labels_that_it_cannot_have_seen() -> None:
    """A mix counts instead of its model; for an imported decoder, the mix and the baseline on unseen labels count."""
    mixed = metrics(0.08, 0.12) | {"mixed_decoder": {"ndcg@10": 0.12}}
    unseen = {"decoder": 0.05, "item_knn": 0.06}

    assert find_problems(mixed, Compared(), GateOptions()) == []
    for own, num_problems in (({}, 1), ({"mixed_decoder": 0.07}, 0), ({"mixed_decoder": 0.055}, 1)):
        scored = mixed | {"decoder": {"ndcg@10": 0.08, "judged_ndcg@10": unseen | own}}
        assert len(find_problems(scored, Compared(), GateOptions())) == num_problems


GOOD, USUAL = metrics(0.12, 0.12), GateOptions()
BELOW_LIVE = (
    "the decoder's ndcg@10 of 0.0975 is 2.5% below that of the live bundle v1, 0.1000 on the same 500 users: "
    "by more than 2% (--max-loss), and beyond the 95 % interval of the difference, -0.0048 to -0.0002"
)
BELOW_REFERENCE = (
    "the decoder's ndcg@10 of 0.0940 is 6.0% below that of the reference v0, 0.1000 on the same 500 users: "
    "by more than 5% (--max-reference-loss)"
)


@pytest.mark.parametrize(
    ("measured", "compared", "options", "complaint"),
    [
        (metrics(0.08, 0.1), Compared(), USUAL, "decoder's ndcg@10 of 0.0800 is not above its floor of 0.0900, 100%"),
        (
            metrics(0.12, 0.12, bigram=0.12),
            Compared(),
            USUAL,
            "0.1200 is not above its floor of 0.1200, 100% of bigram",
        ),
        (
            metrics(0.092, 0.0899),
            Compared(),
            USUAL,
            "student's ndcg@10 of 0.0899 is not above its floor of 0.0900, 100%",
        ),
        (metrics(0.0, 0.0), Compared(), USUAL, "100% of item_knn"),
        (GOOD, Compared(), GateOptions(student_floor=1.5), "150% of item_knn's 0.0900 (--student-floor)"),
        (GOOD, live(-0.0048, -0.0002), USUAL, BELOW_LIVE),
        (GOOD, reference(-0.014, 0.002), USUAL, BELOW_REFERENCE),
    ],
)
def test_bad_models_are_stopped_with_the_reason(measured, compared, options, complaint) -> None:
    """The error names both models with figures and option, and how to publish anyway."""
    with pytest.raises(StageFailed, match=r"nothing was published \(--force") as stopped:
        refuse(find_problems(measured, compared, options))

    assert complaint in str(stopped.value)
