"""Fits over two workers: the same loss as one, and what happens when a rank dies, hangs, or learns from something else."""

import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from models.decoder.weights import load_decoder
from models.registry import BundleStore
from pipelines.codes.options import CodesOptions
from pipelines.codes.tokenize import tokenize
from pipelines.runner.stage import silent
from pipelines.scoring.dense import hidden_states
from pipelines.training.fit.checkpoints import Checkpoints, nothing_alike
from pipelines.training.fit.shard_files import read_shards
from pipelines.training.reports.watched import Logged
from pipelines.training.train_decoder import TrainOptions, train
from pipelines.training.train_student import Inputs, fit_and_save
from pipelines.training.workers.team import ONE, Team
from services.errors import ConfigError, StageFailed
from tests.support.training.ranks import fit_line, train_with_another
from tests.support.training.synthetic import histories_from, raw_events, raw_items, write_ingested, write_with_dislikes
from tests.unit.pipelines.conftest import CPU, DROPPED_DECODER, DROPPED_STUDENT

TWO = Team(workers=2, timeout_s=60)
SAMPLED = replace(DROPPED_DECODER, sample_items=8, text_size=4)
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
}
LONG = replace(DROPPED_DECODER, fit=replace(DROPPED_DECODER.fit, epochs=24, validate_every=8))
Undisturbed = Callable[..., tuple[Path, dict[str, float]]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of the ring at depth 1, in `tokens`, and at depth 2, in `deep`; the same with weights of labels and dislikes in `weighted` and `weighted-deep`."""
    folder = tmp_path_factory.mktemp("data")
    plain, weighted = write_ingested(folder / "ingest"), write_with_dislikes(folder / "weighted-ingest")
    for name, ingested, depth in (
        ("tokens", plain, 1),
        ("deep", plain, 2),
        ("weighted", weighted, 1),
        ("weighted-deep", weighted, 2),
    ):
        (folder / name).mkdir()
        tokenize(ingested, histories_from(ingested), 1_000, folder / name, CodesOptions(depth=depth))
    torch.set_num_threads(1)
    return folder


def saved_in(folder: Path, every_s: float = 60.0) -> Checkpoints:
    """The checkpoints of a fit whose results are beside them."""
    return Checkpoints(folder / "saved", "train", every_s)


def trained(
    tokens: Path, options: TrainOptions, out: Path, team: Team = TWO, every_s: float = 60.0
) -> dict[str, float]:
    """Train over these workers, and return the losses by epoch."""
    out.mkdir(exist_ok=True)
    train(tokens, options, out, saved_in(out, every_s), CPU, silent, team=team)
    return {str(point["epoch"]): point["loss"] for point in json.loads((out / "training.json").read_text())["curve"]}


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Trains without faults, once for all tests that compare with it: the folder, and the losses by epoch."""

    @cache
    def once(tokens: str, options: TrainOptions, team: Team = ONE) -> tuple[Path, dict[str, float]]:
        out = tmp_path_factory.mktemp("undisturbed")
        return out, trained(data / tokens, options, out, team)

    return once


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        ("weighted", SAMPLED),
        ("weighted-deep", replace(DROPPED_DECODER, teacher_weight=0.5)),
        pytest.param(
            "tokens", replace(DROPPED_DECODER, fit=replace(DROPPED_DECODER.fit, num_parts=3)), marks=pytest.mark.grid
        ),
    ],
)
def test_two_workers_learn_what_one_does(
    tokens: str, options: TrainOptions, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Losses and weights are those of one process within fp32's rounding, dropout, sampled items, rows of text, a teacher, weights and dislikes included."""
    one, alone = undisturbed(tokens, options)

    together = trained(data / tokens, options, tmp_path)

    weights = [load_file(folder / "decoder" / "model.safetensors") for folder in (one, tmp_path)]
    assert together == pytest.approx(alone, rel=1e-5)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("workers", "parallel"),
    [
        (2, "fsdp"),
        (2, "tp2"),
        (2, "pp2"),
        pytest.param(4, "hsdp2", marks=pytest.mark.grid),
        pytest.param(4, "ddp+tp2", marks=pytest.mark.grid),
        pytest.param(4, "pp2+ddp", marks=pytest.mark.grid),
    ],
)
def test_a_divided_model_learns_what_a_whole_one_does(
    workers: int, parallel: str, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Each rank has a part of every tensor, or of each layer's products, or some layers. Half of the way in this layout, the rest in one process: the losses of one process, and plain weights."""
    one, alone = undisturbed("weighted", SAMPLED)
    out = tmp_path / parallel
    out.mkdir()

    stop_after(5, data / "weighted", SAMPLED, out, replace(TWO, workers=workers, parallel=parallel))
    kinds = {path.suffix for path in (out / "saved").iterdir() if path.suffix != ".partial"}
    again = trained(data / "weighted", SAMPLED, out, ONE)

    weights = [load_file(folder / "decoder" / "model.safetensors") for folder in (one, out)]
    assert kinds == {".shards"}
    assert again == pytest.approx(alone, rel=1e-5)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4)


def test_a_pipeline_learns_codes_with_a_teacher_and_recomputes(data: Path, tmp_path: Path) -> None:
    """Losses of several levels on the last stage, parts of a batch one after another, dropout again in the backward pass: the losses of one process."""
    options = replace(DROPPED_DECODER, teacher_weight=0.5, fit=replace(DROPPED_DECODER.fit, num_parts=2))
    alone = trained(data / "weighted-deep", options, tmp_path / "one", ONE)

    piped = trained(data / "weighted-deep", options, tmp_path / "two", replace(TWO, parallel="pp2", recompute="full"))

    assert piped == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("pp2", marks=pytest.mark.grid)])
def test_ranks_write_their_files_of_a_decoder_that_transformers_loads(
    parallel: str, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """A file a rank and their index: together one process's weights, and transformers' hidden states are the decoder's."""
    transformers = pytest.importorskip("transformers")
    one, _ = undisturbed("tokens", DROPPED_DECODER)

    trained(data / "tokens", DROPPED_DECODER, tmp_path, replace(TWO, parallel=parallel))

    folder = tmp_path / "decoder"
    ours, expected = (load_decoder(root / "decoder", torch.float32, CPU) for root in (tmp_path, one))
    theirs, loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokens_BL = torch.arange(1, 13).view(2, 6)
    with torch.no_grad():
        hidden_TD = hidden_states(ours, tokens_BL)
        logits_BLV = theirs(tokens_BL).logits
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [
        f"model-0000{number}-of-00002.safetensors" for number in (1, 2)
    ]
    assert not any(loaded.values())
    torch.testing.assert_close(logits_BLV.flatten(0, 1), hidden_TD @ ours.head_weight_VD.T, rtol=1e-4, atol=1e-4)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("compression", [pytest.param("fp16", marks=pytest.mark.grid), "powersgd"])
def test_gradients_in_fewer_bytes_change_losses_little(
    compression: str, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Small buckets alone change nothing but rounding; PowerSGD begins after its first hundred steps."""
    _, expected = undisturbed("tokens", DROPPED_DECODER)

    fewer = replace(TWO, parallel="ddp", compression=compression, bucket_mb=0.001)
    found = trained(data / "tokens", DROPPED_DECODER, tmp_path, fewer)

    assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    ("team", "option"),
    [
        (replace(TWO, parallel="ddp", compression="bf16"), "--compression: DDP sends bf16 on GPUs alone"),
        pytest.param(replace(TWO, workers=4, parallel="pp4"), "--parallel: pp4 leaves a stage", marks=pytest.mark.grid),
    ],
)
def test_a_refusal_on_a_rank_is_raised_as_it_was(team: Team, option: str, data: Path, tmp_path: Path) -> None:
    """More stages than layers, and numbers that no library here adds up: the option, at once."""
    with pytest.raises(ConfigError, match=option):
        trained(data / "tokens", DROPPED_DECODER, tmp_path, team)


def test_ray_train_starts_the_same_fit(
    data: Path, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a Ray that ends with it: the weights are bit for bit those of two workers that this process starts."""
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    here, expected = undisturbed("tokens", DROPPED_DECODER, TWO)

    found = trained(data / "tokens", DROPPED_DECODER, tmp_path, replace(TWO, ray="local"))

    weights = [(folder / "decoder" / "model.safetensors").read_bytes() for folder in (here, tmp_path)]
    assert found == expected
    assert weights[0] == weights[1]


def test_a_shard_with_a_flipped_byte_is_passed_over(data: Path, tmp_path: Path) -> None:
    """In torch's own file of either rank, or in the values: the checkpoint before is read, by one process too, and the log names the damaged one."""
    stop_after(5, data / "tokens", DROPPED_DECODER, tmp_path, replace(TWO, parallel="fsdp"))
    saved = saved_in(tmp_path)
    newest, before = sorted((path for path in saved.folder.iterdir() if path.suffix == ".shards"), reverse=True)
    expected = read_shards(before, nothing_alike)[1]

    for name in ("__0_0.distcp", "__1_0.distcp", "state.json"):
        content = (newest / name).read_bytes()
        (newest / name).write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        with capture_logs() as logged:
            found = saved.newest(watch=Logged())
        (newest / name).write_bytes(content)
        assert found is not None
        assert found.values == expected
        assert newest.name in logged[0]["why"]


def test_a_rank_whose_disk_is_full_fails_the_stage_and_leaves_the_checkpoint_before(data: Path, tmp_path: Path) -> None:
    """One rank's file system takes no more bytes: the error names the rank and what the next run goes on from, and that is whole."""
    with capture_logs() as logged:

        def fill(done: int, _total: int, _words: str) -> None:
            if done == 10:
                resource.prlimit(pids_of(logged)[1], resource.RLIMIT_FSIZE, (1_000, 1_000))

        with pytest.raises(StageFailed, match=r"cannot be written \(rank 1: .*goes on from \d+.shards"):
            train(
                data / "tokens", LONG, tmp_path, saved_in(tmp_path, 0.0), CPU, fill, team=replace(TWO, parallel="fsdp")
            )

    found = saved_in(tmp_path).newest()
    assert found is not None
    assert found.values["epoch"] >= 10


def test_the_number_of_workers_may_change_between_checkpoints(
    data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Two workers stopped on the way, one, and two again: the losses of one process."""
    _, alone = undisturbed("tokens", DROPPED_DECODER)

    for epochs, team in ((3, TWO), (5, ONE)):
        stop_after(epochs, data / "tokens", DROPPED_DECODER, tmp_path, team)
    again = trained(data / "tokens", DROPPED_DECODER, tmp_path, TWO)

    assert again == pytest.approx(alone, rel=1e-5)


class Stopped(Exception):
    """Raised by a test's progress."""


def stop_after(epoch: int, tokens: Path, options: TrainOptions, out: Path, team: Team) -> None:
    """Train until this epoch is done, then stop from outside."""

    def stop(done: int, _total: int, _words: str) -> None:
        if done == epoch:
            raise Stopped

    with pytest.raises(Stopped):
        train(tokens, options, out, saved_in(out, 0.0), CPU, stop, team=team)


def test_the_student_learns_over_two_workers_what_it_learns_over_one(
    data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Its curve over two workers is that of one process."""
    taught, _ = undisturbed("tokens", DROPPED_DECODER)
    inputs, curves = Inputs(data / "tokens", 1, CPU), []
    for team in (ONE, TWO):
        saved = saved_in(tmp_path / str(team.workers))
        path = tmp_path / f"{team.workers}.safetensors"
        fitted = team.fit(
            partial(fit_and_save, inputs, taught / "decoder", DROPPED_STUDENT, path, saved), saved, silent
        )
        curves.append([point["loss"] for point in fitted.curve])

    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.parametrize(("refit", "num_fits"), [("--no-refit", 3), pytest.param("--refit", 5, marks=pytest.mark.grid)])
def test_the_command_trains_evaluates_and_publishes_over_two_workers(refit: str, num_fits: int, tmp_path: Path) -> None:
    """`tailrace pipeline --workers 2` with the shipped shapes: decoder, student and twin, and both again in a refit, start two ranks each, and a bundle is live."""
    raw_events(40, 30, 12).write_csv(tmp_path / "events.csv")
    raw_items(30).write_ndjson(tmp_path / "items.jsonl")
    command = [sys.executable, "-m", "infra.cli.main", "pipeline", "--workers", "2", refit]
    epochs = ["--epochs", "4", "--student-epochs", "4"]
    given = ["--events", str(tmp_path / "events.csv"), "--items", str(tmp_path / "items.jsonl")]
    floors = ["--baseline", "popularity", "--decoder-floor", "0", "--student-floor", "0"]
    environment = os.environ | {"TAILRACE_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}

    words = [*command, *epochs, *given, *floors]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr + done.stdout
    assert "is live" in done.stdout
    assert done.stdout.count("worker_started") == 2 * num_fits
    bundle = BundleStore(tmp_path / "state" / "bundles").live()
    bundle.verify()
    assert bundle.manifest["lineage"]["options"]["workers"] == 2


@pytest.mark.parametrize(
    ("num_kills", "parallel"), [(2, "auto"), pytest.param(5, "auto", marks=pytest.mark.grid), (1, "pp2")]
)
def test_a_killed_rank_does_not_change_the_result(
    num_kills: int, parallel: str, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """SIGKILL of one rank or the other at random epochs: the weights and the curve are those of two workers that nobody killed."""
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
    found = json.loads((broken / "training.json").read_text())["curve"]
    assert len(endings) == num_kills
    assert all("was ended by SIGKILL" in why for why in endings)
    assert {str(point["epoch"]): point["loss"] for point in found} == expected
    files = [sorted(folder.glob("decoder/*.safetensors")) for folder in (broken, whole)]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def pids_of(logged: list[dict[str, object]]) -> list[int]:
    """Return the process ids of the ranks that were started last."""
    return [int(str(line["pid"])) for line in logged if line["event"] == "worker_started"][-2:]


def test_a_paused_rank_is_ended_with_its_stack_and_the_fit_goes_on(
    data: Path, undisturbed: Undisturbed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGSTOP: the other one waits for as long as it may, the paused one prints where it is, and the result is that of an undisturbed fit."""
    _, expected = undisturbed("tokens", LONG, TWO)
    broken, paused = tmp_path, list[int]()

    with capture_logs() as logged:

        def pause(_done: int, _total: int, _words: str) -> None:
            if not paused:
                paused.append(pids_of(logged)[1])
                os.kill(paused[0], signal.SIGSTOP)

        train(data / "tokens", LONG, broken, saved_in(broken, 0.02), CPU, pause, team=Team(workers=2, timeout_s=3))

    found = json.loads((broken / "training.json").read_text())["curve"]
    assert [(line["rank"], line["pid"]) for line in logged if line["event"] == "worker_hung"] == [(1, paused[0])]
    assert "fitting.py" in capfd.readouterr().err
    assert {str(point["epoch"]): point["loss"] for point in found} == expected


@contextmanager
def second_rank_limited(logged: list[dict[str, Any]], limit: int | None) -> Iterator[list[int]]:
    """Inside this block, let each second rank that starts have so many bytes of data at most; and note the most that one has had."""
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


def test_a_rank_that_runs_out_of_memory_lets_all_begin_again_with_smaller_parts(tmp_path: Path) -> None:
    """Its process may have less than a whole batch takes, and more than half of one: the warning has the planner's sizes, and the losses are those of enough memory."""
    ingested, tokens = write_ingested(tmp_path / "ingest", 400), tmp_path / "tokens"
    tokens.mkdir()
    tokenize(ingested, histories_from(ingested), 1_000, tokens, CodesOptions())
    few = replace(DROPPED_DECODER.fit, epochs=1, validate_every=1)
    wide = replace(DROPPED_DECODER, num_layers=1, feed_forward=1 << 14, dropout=0.0, max_batch_tokens=4_096, fit=few)
    kept_bytes = 4 * 2_048 * wide.feed_forward * 4  # of a rank's half of the tokens

    with capture_logs() as logged, second_rank_limited(logged, None) as most:
        expected = trained(tokens, wide, tmp_path / "whole")
    with capture_logs() as logged, second_rank_limited(logged, most[0] - kept_bytes // 4):
        found = trained(tokens, wide, tmp_path / "starved")

    (again,) = [line for line in logged if line["event"] == "workers_started_again"]
    assert (again["log_level"], again["accumulation"]) == ("warning", 2)
    assert re.fullmatch(r"rank 1 is out of memory: [\d,]+ MB predicted \(activations .*\)", again["why"])
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_no_number_on_one_rank_is_left_out_on_both(tmp_path: Path) -> None:
    """Both return to the same checkpoint and name rank and batch; the weight is the same whichever rank it is."""
    results = [
        TWO.fit(
            partial(fit_line, saved_in(tmp_path / str(rank), 0.0), math.nan, rank),
            saved_in(tmp_path / str(rank)),
            silent,
        )
        for rank in (0, 1)
    ]

    for rank, (fitted, weight) in enumerate(results):
        assert [(one["epoch"], one["batch"]) for one in fitted.skipped_batches] == [(1, 2), (2, 2), (3, 2)]
        assert all(f"nan on rank {rank}" in one["why"] for one in fitted.skipped_batches)
        assert weight == results[0][1] != 0.0


def changed_file(tokens: Path, out: Path) -> Path:
    """Copy a folder of tokens in which one training history has another item."""
    shutil.copytree(tokens, out)
    examples = pl.read_parquet(out / "examples.parquet").with_row_index()
    row = examples.filter(pl.col("split") == "train").row(7, named=True)
    changed = [*row["history"][:3], row["history"][4], *row["history"][4:]]
    histories = [
        changed if index == row["index"] else history
        for index, history in examples.select("index", "history").iter_rows()
    ]
    column = pl.Series("history", histories, dtype=examples.schema["history"])
    examples.drop("index").with_columns(column).write_parquet(out / "examples.parquet")
    return out


@pytest.mark.parametrize("what", ["a changed file", "another seed"])
def test_a_rank_that_learns_from_something_else_is_found_at_that_step(what: str, data: Path, tmp_path: Path) -> None:
    """Before any weight changes: the error names the rank, the step and what differs. It is not tried again."""
    other = {"tokens": changed_file(data / "tokens", tmp_path / "changed")} if what == "a changed file" else {"seed": 1}
    saved = saved_in(tmp_path)
    work = partial(train_with_another, data / "tokens", DROPPED_DECODER, saved, 1, other)
    differs = r"the batch; give" if what == "a changed file" else "the random numbers"

    with pytest.raises(StageFailed, match=rf"batch \d+ of epoch 1 rank 1 has other values of .*{differs}"):
        TWO.fit(work, saved, silent)
