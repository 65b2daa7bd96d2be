"""A fit's process as a group of one, and classification of a rank's end."""

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
from pipelines.planner.mesh import Layout
from pipelines.runner.stage import silent
from pipelines.training.fit.batches import Batch, make_batch
from pipelines.training.fit.fitting import Fitted, fit
from pipelines.training.fit.parallel import Group, Method, Share, unusable_share
from pipelines.training.reports.watched import Logged
from pipelines.training.train_decoder import train_in
from pipelines.training.workers.rank import Ending, Seat, work_at
from services.errors import ConfigError
from tests.support.training.bundles import build_catalogue
from tests.support.training.lines import numbered, task_of
from tests.unit.pipelines.conftest import CPU, DROPPED_DECODER, QUICK, Built, checkpoints_in


def weights_of(built: Built, folder: Path, num_parts: int, group: Group) -> bytes:
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
        group=group,
    )
    return (folder / "decoder" / "model.safetensors").read_bytes()


def test_accumulation_multiplies_the_parts_of_a_batch(built: Built, tmp_path: Path) -> None:
    """Two parts and an accumulation factor of two, as after running out of memory, make four parts."""
    four = weights_of(built, tmp_path / "four", 4, Group())

    assert weights_of(built, tmp_path / "two", 2, Group(accumulation=2)) == four
    assert weights_of(built, tmp_path / "one", 1, Group()) != four


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_whole_fit_ends_with_the_same_bits_whatever_is_computed_again(
    recompute: str, built: Built, tmp_path: Path
) -> None:
    """Recomputation gives bitwise equal weights, also with dropout."""
    plain = weights_of(built, tmp_path / "plain", 1, Group())

    assert weights_of(built, tmp_path / recompute, 1, Group(Method(recompute=recompute))) == plain


def test_bf16_changes_products_alone(built: Built, tmp_path: Path) -> None:
    """bf16 training gives other weights, which are saved in fp32."""
    plain = weights_of(built, tmp_path / "fp32", 1, Group(Method(is_bf16=False)))

    halved = weights_of(built, tmp_path / "bf16", 1, Group(Method(is_bf16=True)))

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
    shares = [Share(4.0, 4, 0), Share(float("nan"), 4, 1), Share(4e9, 4, 2)]

    assert unusable_share(shares, 100.0) == " (nan on rank 1, 1e+09 on rank 2)"
    assert unusable_share(shares[1:2], 100.0) == ""


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
        fitted = fit(nn.Linear(1, 1), task, replace(QUICK, epochs=1), checkpoints_in(folder), silent, watch=Logged())
    return fitted, [line["event"] for line in logged]


def test_a_fit_that_waits_for_its_data_says_so(tmp_path: Path) -> None:
    """A wait above a fifth of the step time is logged, and data and step times are counted separately."""
    waiting, told = fit_slowly(tmp_path / "waiting", 0.08, 0.02)
    _, silence = fit_slowly(tmp_path / "busy", 0.0, 0.1)

    assert told == ["steps_wait_for_data"]
    assert silence == []
    assert waiting.times["data"] > waiting.times["step"] > 0.2


@pytest.mark.parametrize(
    ("raises", "how"),
    [
        (lambda: torch.empty(10**15), Ending.OUT_OF_MEMORY),
        (lambda: np.empty(10**15), Ending.OUT_OF_MEMORY),
        (lambda: {}["item"], Ending.BROKEN),
        (lambda: torch.distributed.init_process_group("gloo", store=None, rank=0), Ending.BROKEN),
    ],
)
def test_a_rank_says_how_it_ended(raises: object, how: Ending) -> None:
    """Out-of-memory errors of torch and numpy differ from unexpected errors, and tracebacks are kept."""
    sent: list[object] = []

    ended = work_at(seat(), Group, lambda **_: raises(), sent.append)  # type: ignore[operator,arg-type]

    assert sent == [ended]
    assert ended.how == how
    assert "Traceback" in ended.why


def test_an_error_of_the_users_arrives_as_it_was_raised() -> None:
    """A ConfigError keeps its class and message."""

    def refuse(**_: object) -> None:
        raise ConfigError("--parallel: tp3 does not divide the decoder's num_attention_heads, 2")

    ended = work_at(seat(), Group, refuse, lambda _: None)  # type: ignore[arg-type]

    assert (ended.how, type(ended.error()), str(ended.error())) == (Ending.REFUSED, ConfigError, ended.why)


def seat() -> Seat:
    """Return a rank's seat in a group of one."""
    return Seat(
        rank=0,
        size=1,
        port=0,
        timeout_s=1.0,
        num_threads=1,
        accumulation=1,
        has_gpu=False,
        layout=Layout(),
        method=Method(),
    )
