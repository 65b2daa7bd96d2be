"""The objectives file is validated strictly, and each objective can be counted from the metrics."""

from pathlib import Path

import pytest

from services.errors import ConfigError
from services.observability.objectives import OBJECTIVES_PATH, Tally, load_objectives, tally

SERIES = [
    ("tailrace_requests_total", {"door": "rest", "code": "ok"}, 90.0),
    ("tailrace_requests_total", {"door": "grpc", "code": "internal"}, 6.0),
    ("tailrace_requests_total", {"door": "rest", "code": "invalid_request"}, 4.0),
    ("tailrace_event_to_visible_seconds_count", {}, 50.0),
    ("tailrace_event_to_visible_seconds_bucket", {"le": "0.2"}, 30.0),
    ("tailrace_event_to_visible_seconds_bucket", {"le": "0.25"}, 40.0),
    ("tailrace_student_agreement_ratio_count", {}, 10.0),
    ("tailrace_student_agreement_ratio_bucket", {"le": "0.3"}, 2.0),
]
MISTAKES = [
    ("at_most: 0.25", "at_mast: 0.25", "objectives.6.sli.bounded.at_mast"),
    ("at_most: 0.25", "at_most: 0.25, above: 0.1", "either at_most or above"),
    ("target: 0.95\n", "target: 1.2\n", "objectives.7.target"),
    ("target: 0.95\n", "target: 0.9\n", "agreement can never burn 14.4 times too fast"),
    ("name: freshness", "name: agreement", "two objectives are named agreement"),
    ("long: 1h, short: 5m", "long: 1h, short: 2h", "short window of 2h"),
    ("long: 1h, short: 5m", "long: 1h, short: 60m", "short window of 60m in one of 1h"),
    ("long: 1h", "long: 1 hour", "ladder.0.long"),
    ("window_days: 30", "window_days: [", "not YAML"),
    ("severity: page}", "severity: email}", "ladder.0.severity"),
]


@pytest.mark.parametrize(
    ("name", "bad", "total"), [("availability", 6, 100), ("freshness", 10, 50), ("agreement", 2, 10)]
)
def test_both_kinds_are_counted_from_plain_series(name: str, bad: float, total: float) -> None:
    """A ratio counts its bad codes, a bounded histogram the observations on the wrong side of its bound."""
    objective = next(objective for objective in load_objectives().objectives if objective.name == name)

    counted = tally(objective, lambda selector: sum(value for *series, value in SERIES if selector.selects(*series)))

    assert (counted.bad, counted.total) == (bad, total)
    assert counted.good_share == pytest.approx(1 - bad / total)


def test_no_observations_are_not_perfect() -> None:
    """Without observations the good fraction is None; a single good observation gives 1."""
    objective = load_objectives().objectives[0]

    counted = tally(objective, lambda _selector: 0.0)

    assert counted.good_share is None
    assert Tally(bad=0, total=1).good_share == 1
    assert objective.target == 0.999
    assert objective.budget == 0.001, "without a floating point's tail"


@pytest.mark.parametrize(("right", "wrong", "words"), MISTAKES)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, right: str, wrong: str, words: str) -> None:
    """An unknown, missing, mistyped or contradictory field is a ConfigError that names its position."""
    text = OBJECTIVES_PATH.read_text()
    assert right in text
    path = tmp_path / "objectives.yaml"
    path.write_text(text.replace(right, wrong, 1))

    with pytest.raises(ConfigError) as raised:
        load_objectives(path)

    assert words in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_file_without_fields_is_named_as_a_whole(tmp_path: Path) -> None:
    """For a list or a missing file, which have no field to name, the error names the file."""
    path = tmp_path / "objectives.yaml"
    path.write_text("[1, 2]")

    with pytest.raises(ConfigError, match=r"objectives\.yaml: the file: "):
        load_objectives(path)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_objectives(tmp_path / "nowhere.yaml")
