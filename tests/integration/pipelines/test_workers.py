"""Fits over two workers: the same loss as one for each layout; a rank with different data is detected."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from models.decoder.weights import load_decoder
from models.registry.store import BundleStore
from pipelines.runner.stage import silent
from pipelines.scoring.dense import hidden_states
from pipelines.training.train_decoder import TrainOptions
from pipelines.training.train_student import Inputs, fit_and_save
from pipelines.training.workers.team import ONE, Team
from services.errors import ConfigError, StageFailed
from tests.support.training.ranks import train_with_another
from tests.support.training.synthetic import raw_events, raw_items
from tests.support.training.teams import TWO, Undisturbed, saved_in, stop_after, trained
from tests.unit.pipelines.conftest import CPU, DROPPED_DECODER, DROPPED_STUDENT

SAMPLED = replace(DROPPED_DECODER, sample_items=8, text_size=4)
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
}


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        pytest.param("weighted", SAMPLED, marks=pytest.mark.grid),  # the layouts below hold these options
        ("weighted-deep", replace(DROPPED_DECODER, teacher_weight=0.5)),
        pytest.param(
            "tokens", replace(DROPPED_DECODER, fit=replace(DROPPED_DECODER.fit, num_parts=3)), marks=pytest.mark.grid
        ),
    ],
)
def test_two_workers_learn_what_one_does(
    tokens: str, options: TrainOptions, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Losses and weights equal one process's within fp32 rounding, with every training option in use."""
    single, alone = undisturbed(tokens, options)

    together = trained(data / tokens, options, tmp_path)

    weights = [load_file(folder / "decoder" / "model.safetensors") for folder in (single, tmp_path)]
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
    """Each layout divides the tensors; half of the fit in it and the rest in one process give one process's losses."""
    single, alone = undisturbed("weighted", SAMPLED)
    out = tmp_path / parallel
    out.mkdir()

    stop_after(5, data / "weighted", SAMPLED, out, replace(TWO, workers=workers, parallel=parallel))
    kinds = {path.suffix for path in (out / "saved").iterdir() if path.suffix != ".partial"}
    again = trained(data / "weighted", SAMPLED, out, ONE)

    weights = [load_file(folder / "decoder" / "model.safetensors") for folder in (single, out)]
    assert kinds == {".shards"}
    assert again == pytest.approx(alone, rel=1e-5)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.grid  # the layout pp2 above, test_pipelined.py and test_recompute.py hold the parts
def test_a_pipeline_learns_codes_with_a_teacher_and_recomputes(data: Path, tmp_path: Path) -> None:
    """Pipeline stages with several code levels, micro-batches and dropout give the losses of one process."""
    options = replace(DROPPED_DECODER, teacher_weight=0.5, fit=replace(DROPPED_DECODER.fit, num_parts=2))
    alone = trained(data / "weighted-deep", options, tmp_path / "one", ONE)

    piped = trained(data / "weighted-deep", options, tmp_path / "two", replace(TWO, parallel="pp2", recompute="full"))

    assert piped == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("pp2", marks=pytest.mark.grid)])
def test_ranks_write_their_files_of_a_decoder_that_transformers_loads(
    parallel: str, data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """A file per rank and their index hold one process's weights, and transformers computes the same states."""
    transformers = pytest.importorskip("transformers")
    single, _ = undisturbed("tokens", DROPPED_DECODER)

    trained(data / "tokens", DROPPED_DECODER, tmp_path, replace(TWO, parallel=parallel))

    folder = tmp_path / "decoder"
    ours, expected = (load_decoder(root / "decoder", torch.float32, CPU) for root in (tmp_path, single))
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
    """Small buckets change only rounding; PowerSGD starts after its first hundred steps."""
    _, expected = undisturbed("tokens", DROPPED_DECODER)

    fewer = replace(TWO, parallel="ddp", compression=compression, bucket_mb=0.001)
    losses = trained(data / "tokens", DROPPED_DECODER, tmp_path, fewer)

    assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    ("team", "option"),
    [
        (replace(TWO, parallel="ddp", compression="bf16"), "--compression: DDP sends bf16 only on GPUs"),
        pytest.param(replace(TWO, workers=4, parallel="pp4"), "--parallel: pp4 leaves a stage", marks=pytest.mark.grid),
    ],
)
def test_a_refusal_on_a_rank_is_raised_as_it_was(team: Team, option: str, data: Path, tmp_path: Path) -> None:
    """More stages than layers, and unsupported number formats, are refused at once with the option."""
    with pytest.raises(ConfigError, match=option):
        trained(data / "tokens", DROPPED_DECODER, tmp_path, team)


def test_ray_train_starts_the_same_fit(
    data: Path, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary Ray cluster and two local workers train the same weights, bit for bit."""
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    here, expected = undisturbed("tokens", DROPPED_DECODER, TWO)

    losses = trained(data / "tokens", DROPPED_DECODER, tmp_path, replace(TWO, ray="local"))

    weights = [(folder / "decoder" / "model.safetensors").read_bytes() for folder in (here, tmp_path)]
    assert losses == expected
    assert weights[0] == weights[1]


@pytest.mark.grid  # each layout above continues in one process; test_checkpoints.py holds both forms of files
def test_the_number_of_workers_may_change_between_checkpoints(
    data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Two workers stopped midway, one, and two again give the losses of one process."""
    _, alone = undisturbed("tokens", DROPPED_DECODER)

    for epochs, team in ((3, TWO), (5, ONE)):
        stop_after(epochs, data / "tokens", DROPPED_DECODER, tmp_path, team)
    again = trained(data / "tokens", DROPPED_DECODER, tmp_path, TWO)

    assert again == pytest.approx(alone, rel=1e-5)


def test_the_student_learns_over_two_workers_what_it_learns_over_one(
    data: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The student's curve over two workers is that of one process."""
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


@pytest.mark.grid  # the fits above run over two workers, and each end-to-end run trains by the command
@pytest.mark.parametrize(("refit", "num_fits"), [("--no-refit", 3), ("--refit", 5)])
def test_the_command_trains_evaluates_and_publishes_over_two_workers(refit: str, num_fits: int, tmp_path: Path) -> None:
    """`tailrace pipeline --workers 2` starts two ranks for each fit and refit, and promotes a bundle."""
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


def changed_file(tokens: Path, out: Path) -> Path:
    """Copy a folder of tokens, changing an item of one training history."""
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


@pytest.mark.parametrize("what", ["a changed file", pytest.param("another seed", marks=pytest.mark.grid)])
def test_a_rank_that_learns_from_something_else_is_found_at_that_step(what: str, data: Path, tmp_path: Path) -> None:
    """Before any weight changes, the error names the rank, the step and the difference. It is not retried."""
    other = {"tokens": changed_file(data / "tokens", tmp_path / "changed")} if what == "a changed file" else {"seed": 1}
    saved = saved_in(tmp_path)
    work = partial(train_with_another, data / "tokens", DROPPED_DECODER, saved, 1, other)
    differs = r"the batch; give" if what == "a changed file" else "the random numbers"

    with pytest.raises(StageFailed, match=rf"batch \d+ of epoch 1 rank 1 has other values of .*{differs}"):
        TWO.fit(work, saved, silent)
