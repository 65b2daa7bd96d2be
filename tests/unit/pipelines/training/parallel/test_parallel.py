"""A fit as a mesh of one process, the ranks' positions in a mesh, and classification of a rank's end."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from pipelines.data.labelled import Weighted
from pipelines.runner.stage import silent
from pipelines.training.batches import Batch, make_batch
from pipelines.training.fit.fitting import Fitted, fit
from pipelines.training.parallel.layout import layout_of
from pipelines.training.parallel.mesh import ONE_PROCESS, Mesh, Method
from pipelines.training.parallel.ranks import LossSum, describe_unusable
from pipelines.training.reports.watched import LoggedFit
from pipelines.training.train_decoder import train_in
from pipelines.training.workers.rank import ExitKind, RankStart, run_rank
from services.errors import ConfigError
from tests.support.training.bundles import build_catalogue
from tests.support.training.lines import numbered, task_of
from tests.unit.pipelines.conftest import CPU, DROPPED_DECODER, QUICK, Built, checkpoints_in

START = RankStart(mesh=ONE_PROCESS, num_threads=1, has_gpu=False)


def do_nothing() -> None:
    """Join no other rank."""


def weights_of(built: Built, folder: Path, num_parts: int, method: Method = ONE_PROCESS.method) -> bytes:
    """Train the small decoder with dropout and return its weights file."""
    options = replace(DROPPED_DECODER, fit=replace(DROPPED_DECODER.fit, num_parts=num_parts))
    folder.mkdir()
    train_in(
        built.trained.tokenized,
        options,
        folder,
        checkpoints_in(folder / "saved"),
        CPU,
        None,
        None,
        progress=silent,
        mesh=Mesh(method=method),
    )
    return (folder / "decoder" / "model.safetensors").read_bytes()


def test_accumulation_multiplies_the_parts_of_a_batch(built: Built, tmp_path: Path) -> None:
    """Two parts and an accumulation factor of two, as after running out of memory, make four parts."""
    four = weights_of(built, tmp_path / "four", 4)

    assert weights_of(built, tmp_path / "two", 2, Method(accumulation=2)) == four
    assert weights_of(built, tmp_path / "one", 1) != four


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_whole_fit_ends_with_the_same_bits_whatever_is_computed_again(
    recompute: str, built: Built, tmp_path: Path
) -> None:
    """Recomputation gives bitwise equal weights, also with dropout."""
    plain = weights_of(built, tmp_path / "plain", 1)

    assert weights_of(built, tmp_path / recompute, 1, Method(recompute=recompute)) == plain


def test_bf16_changes_products_alone(built: Built, tmp_path: Path) -> None:
    """bf16 training gives other weights, which are saved in fp32."""
    plain = weights_of(built, tmp_path / "fp32", 1, Method(is_bf16=False))

    halved = weights_of(built, tmp_path / "bf16", 1, Method(is_bf16=True))

    assert halved != plain
    assert len(halved) == len(plain)


def test_a_batch_is_known_by_its_content() -> None:
    """The digest changes with items, order and masked labels, and is equal for a copy."""
    catalogue, rows = build_catalogue(), [np.array([1, 2, 3]), np.array([4, 5])]
    masked = Weighted(rows[0], np.array([1.0, 0.0, 1.0]))

    digests = [
        make_batch(windows, catalogue).signed().digest
        for windows in (rows, list(rows), [np.array([1, 2, 4]), rows[1]], rows[::-1], [masked, rows[1]])
    ]

    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    assert make_batch(rows, catalogue).digest == 0


def test_the_ranks_whose_loss_is_not_plausible_are_named() -> None:
    """NaN and far too high losses are reported with their rank, except for a single process."""
    sums = [LossSum(4.0, 4, 0), LossSum(float("nan"), 4, 1), LossSum(4e9, 4, 2)]

    assert describe_unusable(sums, 100.0) == " (nan on rank 1, 1e+09 on rank 2)"
    assert describe_unusable(sums[1:2], 100.0) == ""


@pytest.mark.parametrize(
    ("parallel", "workers", "positions", "loss_ranks"),
    [
        ("ddp", 2, [(0, 0, 0), (1, 0, 0)], [0, 1]),
        ("fsdp", 2, [(0, 0, 0), (1, 0, 0)], [0, 1]),
        ("hsdp2", 4, [(0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)], [0, 1, 2, 3]),
        ("fsdp+tp2", 4, [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)], [0, 2]),
        ("pp2", 2, [(0, 0, 0), (0, 0, 1)], [1]),
        ("pp2+ddp", 4, [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)], [2, 3]),
    ],
)
def test_a_rank_has_one_position_in_the_mesh(
    parallel: str, workers: int, positions: list[tuple[int, int, int]], loss_ranks: list[int]
) -> None:
    """Ranks are numbered with tensor parallelism innermost; one rank of each part of the rows knows its loss."""
    layout = layout_of(parallel, workers)
    meshes = [Mesh(layout=layout, rank=rank) for rank in range(workers)]

    assert [(mesh.dp_rank, mesh.tp_rank, mesh.pp_rank) for mesh in meshes] == positions
    assert list(meshes[0].loss_ranks) == loss_ranks
    assert [mesh.is_divided for mesh in meshes] == [parallel != "ddp"] * workers


def slow(seconds: float, number: int) -> Batch:
    """Return a batch after a delay, as from a slow disk."""
    time.sleep(seconds)
    return numbered(number)


def fit_slowly(folder: Path, batch_s: float, step_s: float) -> tuple[Fitted, list[str]]:
    """Fit one weight for about a second with these batch and step times; return the logged events."""

    def loss(model: nn.Module, _batch: Batch) -> tuple[torch.Tensor, int]:
        time.sleep(step_s)
        return (model(torch.ones(1, 1)) - 5).pow(2).sum(), 1

    task = task_of(loss, [partial(slow, batch_s, number) for number in range(11)], uniform_loss=1e9)
    with capture_logs() as logged:
        fitted = fit(nn.Linear(1, 1), task, replace(QUICK, epochs=1), checkpoints_in(folder), silent, watch=LoggedFit())
    return fitted, [line["event"] for line in logged]


def test_a_fit_that_waits_for_its_data_says_so(tmp_path: Path) -> None:
    """A wait above a fifth of the step time is logged, and data and step times are counted separately."""
    waiting, logged = fit_slowly(tmp_path / "waiting", 0.08, 0.02)
    _, silence = fit_slowly(tmp_path / "busy", 0.0, 0.1)

    assert logged == ["steps_wait_for_data"]
    assert silence == []
    assert waiting.times["data"] > waiting.times["step"] > 0.2


@pytest.mark.parametrize(
    ("raises", "how"),
    [
        (lambda: torch.empty(10**15), ExitKind.OUT_OF_MEMORY),
        (lambda: np.empty(10**15), ExitKind.OUT_OF_MEMORY),
        (lambda: {}["item"], ExitKind.BROKEN),
        (lambda: torch.distributed.init_process_group("gloo", store=None, rank=0), ExitKind.BROKEN),
    ],
)
def test_a_rank_says_how_it_ended(raises: object, how: ExitKind) -> None:
    """Out-of-memory errors of torch and numpy differ from unexpected errors, and tracebacks are kept."""
    sent: list[object] = []

    ended = run_rank(START, do_nothing, lambda **_: raises(), sent.append)  # type: ignore[operator,arg-type]

    assert sent == [ended]
    assert ended.how == how
    assert "Traceback" in ended.why


def test_an_error_of_the_users_arrives_as_it_was_raised() -> None:
    """A ConfigError keeps its class and message."""

    def refuse(**_: object) -> None:
        raise ConfigError("--parallel: tp3 does not divide the decoder's num_attention_heads, 2")

    ended = run_rank(START, do_nothing, refuse, lambda _: None)  # type: ignore[arg-type]

    assert (ended.how, type(ended.error()), str(ended.error())) == (ExitKind.REFUSED, ConfigError, ended.why)
