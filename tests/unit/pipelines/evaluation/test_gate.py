"""The gate: which models may be published."""

from typing import Any

import pytest

from pipelines.evaluation.gate import GateOptions, find_problems, next_steps, refuse
from services.errors import StageFailed


def metrics(
    decoder: float, student: float, item_knn: float = 0.09, bigram: float = 0.05
) -> dict[str, dict[str, float]]:
    """An evaluation with these NDCGs."""
    found = {"decoder": decoder, "student": student, "item_knn": item_knn, "bigram": bigram, "popularity": 0.01}
    return {name: {"ndcg@10": value} for name, value in found.items()}


def against_live(low: float, high: float) -> list[dict[str, Any]]:
    """The decoder against a live one of .1000, with this interval of the difference."""
    means = {"champion_ndcg": 0.1, "challenger_ndcg": 0.1 + (low + high) / 2}
    return [{"model": "decoder", "champion": "v1", "num_users": 500, **means, "low": low, "high": high}]


def test_good_models_pass() -> None:
    """Both beat the best baseline, the student with 95 % of the decoder or more, and neither is surely worse than the live one by 2 %."""
    for student in (0.12, 0.114, 0.2):
        assert find_problems(metrics(0.12, student), [], GateOptions()) == []
    for interval in ((-0.03, 0.0), (-0.03, -0.001), (-0.01, 0.01), (0.01, 0.02)):
        assert find_problems(metrics(0.12, 0.12), against_live(*interval), GateOptions()) == []
    refuse([])


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (metrics(0.08, 0.1), "the decoder's ndcg@10 of 0.0800 does not beat item_knn's 0.0900"),
        (metrics(0.12, 0.12, bigram=0.12), "the decoder's ndcg@10 of 0.1200 does not beat bigram's 0.1200"),
        (metrics(0.12, 0.113), r"94\.2% of the decoder's 0\.1200, under 95%"),
        (metrics(0.092, 0.0899), "the student's ndcg@10 of 0.0899 does not beat item_knn's"),
        (metrics(0.0, 0.0), "does not beat item_knn"),
    ],
)
def test_bad_models_are_stopped_with_the_reason(found: dict[str, dict[str, float]], complaint: str) -> None:
    """The message names the number that is too low, that nothing was published, and what would publish it."""
    with pytest.raises(StageFailed, match=complaint) as stopped:
        refuse(find_problems(found, [], GateOptions()))

    assert "nothing was published (--force" in str(stopped.value)


def test_a_model_worse_than_the_live_one_is_named_with_both_figures() -> None:
    """At least 2 % worse at 95 %: the message has both means, the interval, and the option."""
    (problem,) = find_problems(metrics(0.12, 0.12), against_live(-0.02, -0.003), GateOptions())

    assert problem == (
        "the decoder's ndcg@10 of 0.0885 is below that of the live bundle v1, 0.1000 on the same 500 users: "
        "95 % interval of the difference -0.0200 to -0.0030, beyond -2% (--max-loss)"
    )


@pytest.mark.parametrize(
    ("found", "live", "begins"),
    [
        (
            metrics(0.08, 0.085),
            [],
            [
                "item_knn won: its ndcg@10 of 0.0900 is 0.0100 above the decoder's 0.0800; for data like this so simple",
                "more data: these are 480 events of 40 users on 30 items",
                "--baseline bigram asks for less: both models beat popularity and bigram",
            ],
        ),
        (
            metrics(0.0, 0.0),
            [],
            ["item_knn won: ", "more data: ", "no baseline is beaten by both models", "--student-epochs"],
        ),
        (metrics(0.12, 0.1), [], ["--student-epochs trains the student longer, --min-student-share"]),
        (metrics(0.12, 0.12), against_live(-0.001, 0.003), []),
        (metrics(0.12, 0.12), against_live(-0.02, -0.003), ["v1 stays live, "]),
    ],
)
def test_what_one_can_do_follows_from_what_is_beyond_its_bound(
    found: dict[str, dict[str, float]], live: list[dict[str, Any]], begins: list[str]
) -> None:
    """The baseline that won and by how much, that it may be enough, a baseline that both models beat, more data, and the options."""
    data = {"num_events": 480, "num_users": 40, "num_items": 30}

    steps = next_steps(found, live, data, GateOptions())

    assert [step.startswith(begin) for step, begin in zip(steps, begins, strict=True)] == [True] * len(begins)
