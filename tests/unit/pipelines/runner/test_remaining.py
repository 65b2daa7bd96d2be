"""The estimate of a training's duration."""

from pipelines.runner.remaining import RemainingTime


def test_the_first_epoch_estimates_all_fits_and_later_epochs_what_is_left() -> None:
    """The first line tells the time in all; later lines, at most once a minute, the rest."""
    remaining, lines = RemainingTime(), []
    remaining.begin("ingest", 0.0)
    lines.append(remaining.line(1, 2, 1.0))
    remaining.begin("train", 100.0)
    lines += [remaining.line(done, 20, 100.0 + 12.0 * done) for done in (1, 2, 6, 20)]
    remaining.end(200.0)
    remaining.begin("refit", 500.0)
    lines += [remaining.line(1, 10, 524.0)]

    assert [bool(line) for line in lines] == [False, True, False, True, False, True]
    stage_s = 12.0 * 20
    assert lines[1].startswith("training: about ")
    assert int(lines[1].split()[2]) * 60 > 2 * stage_s
    assert lines[1].endswith("in all")
    assert lines[5] == "training: about 3 minutes left"


def test_stages_that_the_run_leaves_out_take_no_time() -> None:
    """With `--until train`, the estimate is the decoder's own time."""
    remaining = RemainingTime(["ingest", "train"])
    remaining.begin("train", 0.0)

    assert remaining.line(1, 4, 60.0) == "training: about 4 minutes in all"


def test_a_stage_done_before_changes_nothing() -> None:
    """A skipped stage takes no time and does not change the estimates of other stages."""
    remaining = RemainingTime()
    remaining.begin("train", 0.0)
    remaining.end(0.0)
    remaining.begin("distill", 1.0)

    assert remaining.line(1, 4, 31.0).startswith("training: about ")
