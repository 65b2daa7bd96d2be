"""Fits over two workers with a killed, hanging or out-of-memory rank, a full disk, or a non-finite loss."""

import json
import math
import os
import random
import re
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipelines.codes.options import CodesOptions
from pipelines.codes.tokenize import tokenize
from pipelines.runner.stage import silent
from pipelines.training.train_decoder import train
from pipelines.training.workers.team import Team
from services.errors import StageFailed
from tests.support.training.ranks import fit_line
from tests.support.training.synthetic import histories_from, write_ingested
from tests.support.training.teams import LONG, TWO, Undisturbed, pids_of, saved_in, trained
from tests.unit.pipelines.conftest import CPU, DROPPED_DECODER


def test_a_rank_whose_disk_is_full_fails_the_stage_and_leaves_the_checkpoint_before(data: Path, tmp_path: Path) -> None:
    """If a rank's file system is full, the error names the rank and the intact checkpoint for the next run."""
    with capture_logs() as logged:

        def fill(done: int, _total: int, _words: str) -> None:
            if done == 10:
                resource.prlimit(pids_of(logged)[1], resource.RLIMIT_FSIZE, (1_000, 1_000))

        with pytest.raises(StageFailed, match=r"cannot be written \(rank 1: .*resumes from \d+.shards"):
            train(
                data / "tokens", LONG, tmp_path, saved_in(tmp_path, 0.0), CPU, fill, team=replace(TWO, parallel="fsdp")
            )

    newest = saved_in(tmp_path).newest()
    assert newest is not None
    assert newest.values["epoch"] >= 10


@pytest.mark.parametrize(
    ("num_kills", "parallel"),
    [(2, "auto"), pytest.param(5, "auto", marks=pytest.mark.grid), pytest.param(1, "pp2", marks=pytest.mark.grid)],
)
def test_a_killed_rank_does_not_change_the_result(
    num_kills: int, parallel: str, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """SIGKILL of either rank at random epochs gives the weights and curve of two undisturbed workers."""
    broken, team = tmp_path, replace(TWO, parallel=parallel)
    whole, expected = undisturbed("tokens", LONG, team)
    draw = random.Random(num_kills)
    victims = {epoch: draw.randrange(2) for epoch in draw.sample(range(2, 22), num_kills)}

    with capture_logs() as logged:

        def kill(done: int, _total: int, _words: str) -> None:
            if (victim := victims.pop(done, None)) is not None:
                os.kill(pids_of(logged)[victim], signal.SIGKILL)

        train(data / "tokens", LONG, broken, saved_in(broken, 0.02), CPU, kill, team=team)

    endings = [line["why"] for line in logged if line["event"] == "workers_started_again"]
    curve = json.loads((broken / "training.json").read_text())["curve"]
    assert len(endings) == num_kills
    assert all("was ended by SIGKILL" in why for why in endings)
    assert {str(point["epoch"]): point["loss"] for point in curve} == expected
    files = [sorted(folder.glob("decoder/*.safetensors")) for folder in (broken, whole)]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_a_paused_rank_is_ended_with_its_stack_and_the_fit_goes_on(
    data: Path, undisturbed: Undisturbed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The peer of a rank stopped by SIGSTOP times out, the rank prints its stack, and the fit has the usual result."""
    _, expected = undisturbed("tokens", LONG, TWO)
    broken, paused = tmp_path, list[int]()

    with capture_logs() as logged:

        def pause(_done: int, _total: int, _words: str) -> None:
            if not paused:
                paused.append(pids_of(logged)[1])
                os.kill(paused[0], signal.SIGSTOP)

        train(data / "tokens", LONG, broken, saved_in(broken, 0.02), CPU, pause, team=Team(workers=2, timeout_s=3))

    curve = json.loads((broken / "training.json").read_text())["curve"]
    assert [(line["rank"], line["pid"]) for line in logged if line["event"] == "worker_hung"] == [(1, paused[0])]
    assert "fitting.py" in capfd.readouterr().err
    assert {str(point["epoch"]): point["loss"] for point in curve} == expected


@contextmanager
def second_rank_limited(logged: list[dict[str, Any]], limit: int | None) -> Iterator[list[int]]:
    """In this block, limit the data size of each second rank that starts; record the peak."""
    most, is_over, limited = [0], threading.Event(), set[int]()

    def watch() -> None:
        while not is_over.wait(0.005):
            ranks = [line["pid"] for line in list(logged) if line["event"] == "worker_started" and line["rank"] == 1]
            with suppress(OSError, IndexError):
                if limit is not None and ranks[-1] not in limited:
                    resource.prlimit(ranks[-1], resource.RLIMIT_DATA, (limit, limit))
                    limited.add(ranks[-1])
                sizes = Path(f"/proc/{ranks[-1]}/status").read_text().partition("VmData:")[2].split()
                most[0] = max(most[0], 1_024 * int(sizes[0]))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield most
    finally:
        is_over.set()
        watching.join()


@pytest.mark.grid  # test_attempts.py holds the smaller parts, test_parallel.py how such a rank ends
def test_a_rank_that_runs_out_of_memory_lets_all_begin_again_with_smaller_parts(tmp_path: Path) -> None:
    """With memory for less than a whole batch, the warning has the planner's sizes, and the losses are unchanged."""
    ingested, tokens = write_ingested(tmp_path / "ingest", 400), tmp_path / "tokens"
    tokens.mkdir()
    tokenize(ingested, histories_from(ingested), 1_000, tokens, CodesOptions())
    few = replace(DROPPED_DECODER.fit, epochs=1, validate_every=1)
    wide = replace(DROPPED_DECODER, num_layers=1, feed_forward=1 << 14, dropout=0.0, max_batch_tokens=4_096, fit=few)
    kept_bytes = 4 * 2_048 * wide.feed_forward * 4  # of a rank's half of the tokens

    with capture_logs() as logged, second_rank_limited(logged, None) as most:
        expected = trained(tokens, wide, tmp_path / "whole")
    with capture_logs() as logged, second_rank_limited(logged, most[0] - kept_bytes // 4):
        losses = trained(tokens, wide, tmp_path / "starved")

    (again,) = [line for line in logged if line["event"] == "workers_started_again"]
    assert (again["log_level"], again["accumulation"]) == ("warning", 2)
    assert re.fullmatch(r"rank 1 is out of memory: [\d,]+ MB predicted \(activations .*\)", again["why"])
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_no_number_on_one_rank_is_left_out_on_both(tmp_path: Path) -> None:
    """Both ranks return to the same checkpoint and name rank and batch; the weight does not depend on the rank."""
    results = [
        TWO.fit(
            partial(fit_line, saved_in(tmp_path / str(rank), 0.0), math.nan, rank),
            saved_in(tmp_path / str(rank)),
            silent,
        )
        for rank in (0, 1)
    ]

    for rank, (fitted, weight) in enumerate(results):
        assert [(batch["epoch"], batch["batch"]) for batch in fitted.skipped_batches] == [(1, 2), (2, 2), (3, 2)]
        assert all(f"nan on rank {rank}" in batch["why"] for batch in fitted.skipped_batches)
        assert weight == results[0][1] != 0.0
