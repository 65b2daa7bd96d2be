"""Rules of choosing what the parts of a reading count."""

import numpy as np

from models.wishes.reader import Weights
from pipelines.runner.stage import silent
from pipelines.wishes.weights import ReadCase, choose_weights


def cases_with(name: str, label: float, others: float, num: int = 200) -> list[ReadCase]:
    """Cases whose label has one score of a part, the other items another; the model ranks the label sixth."""
    rng = np.random.default_rng(0)
    logs = [np.concatenate([[0.0], np.full(5, 0.5), np.full(35, -0.3)]) + rng.normal(0, 0.05, 41) for _ in range(num)]
    part = np.concatenate([[label], np.full(40, others)]).astype(np.float32)
    return [ReadCase("kind", log.astype(np.float32), {name: part}) for log in logs]


def test_a_part_that_raises_labels_keeps_its_weight() -> None:
    """A useful part counts at least by default, and the record shows its gain."""
    weights, about = choose_weights(cases_with("value", 1.0, 0.0), silent)
    assert weights.value >= Weights().value
    assert about["read"]["all"] > about["unread"]["all"]


def test_a_part_that_harms_labels_counts_nothing() -> None:
    """The weight of a part that lowers labels becomes 0."""
    weights, _ = choose_weights(cases_with("text", -3.0, 3.0), silent)
    assert weights.text == 0


def test_a_part_without_a_shown_gain_keeps_its_default() -> None:
    """Noise moves no weight."""
    weights, _ = choose_weights(cases_with("word", 1.0, 1.0), silent)
    assert weights == Weights()


def test_an_excluded_label_is_ranked_last() -> None:
    """A reading that excludes the label loses the case."""
    case = ReadCase("kind", np.array([-np.inf, 0.0, 0.0], dtype=np.float32), {})
    assert case.rank(Weights()) == 3
