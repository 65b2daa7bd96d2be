"""The text benchmark's figures. `pytest tests/unit/benchmarks/test_text_figures.py`."""

from benchmarks.text.streams import Wave, figures, row

SLOW = Wave([[0.5, 0.75, 1.0], [0.5, 1.0, 1.5]], num_tokens=6)
FAST = Wave([[0.25, 0.375, 0.5], [0.25, 0.5, 0.75]], num_tokens=6)


def test_a_wave_lasts_until_its_last_text_ends() -> None:
    """Its speed counts the tokens of all texts."""
    assert SLOW.seconds == 1.5
    assert figures([SLOW], 3)["tokens_per_s"] == 4.0


def test_first_tokens_and_gaps_are_the_streams() -> None:
    """The gap is a stream's mean in milliseconds, so tokens that arrived together count one by one."""
    found = figures([Wave([[0.1, 0.4], [0.3, 0.6]], num_tokens=8)], 4)

    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == (100.0, 300.0)
    assert found["gap_p50_ms"] == 100.0


def test_a_ratio_of_one_is_a_door_that_costs_nothing() -> None:
    """A ratio below 1 is a door that is slower than the engine."""
    same, half = row(2, [FAST], [FAST], 3), row(2, [FAST], [SLOW], 3)

    assert same["door_over_engine"] == {"tokens_per_s": 1.0, "gap": 1.0, "ttft_added_ms": 0.0}
    assert half["door_over_engine"] == {"tokens_per_s": 0.5, "gap": 0.5, "ttft_added_ms": 250.0}
    assert half["chunks_per_text"] == 3.0
