"""The planner's predicted training memory and the measured memory."""

from pathlib import Path

import pytest
import torch

from models.decoder.weights import load_decoder
from pipelines.planner.memory import training_memory
from pipelines.planner.mesh import ParallelLayout
from pipelines.planner.shapes import shape_of
from pipelines.runner.stage import silent
from pipelines.training.fit.memory import PeakMemory
from pipelines.training.planned_memory import describe_memory
from pipelines.training.train_decoder import read_training, train
from tests.unit.pipelines.conftest import CPU, SMALL_DECODER, Built, checkpoints_in

MEGABYTE = 2**20


def test_a_training_reports_the_planners_memory_beside_its_own(built: Built, tmp_path: Path) -> None:
    """The prediction is by component, and the measurement lies between the weights and the process's peak."""
    train(built.trained.tokenized, SMALL_DECODER, tmp_path, checkpoints_in(tmp_path / "saved"), CPU, silent)

    speed = read_training(tmp_path)["speed"]
    memory, decoder = speed["memory"], load_decoder(tmp_path / "decoder", torch.float32, CPU)
    layout = ParallelLayout(micro_batch=SMALL_DECODER.max_batch_tokens)
    planned = training_memory(shape_of(decoder.config, "decoder"), layout, is_bf16=False, fuses_norms=False)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters())
    assert memory["predicted"] == pytest.approx(
        {name: size for name, size in planned.parts.items() if name != "framework"}
    )
    assert memory["predicted"]["weights"] == weights
    assert weights <= memory["measured_bytes"] < speed["peak_bytes"]
    assert describe_memory(memory).startswith(f"{memory['measured_bytes'] / 1e6:,.0f} MB measured, ")


def test_what_others_take_between_is_not_counted() -> None:
    """Memory of steps counts, memory of a validation in between does not; the process's peak includes both."""
    peak = PeakMemory(CPU)
    torch.ones(64 * MEGABYTE // 4)
    peak.note()
    torch.ones(256 * MEGABYTE // 4)
    peak.begin()
    torch.ones(32 * MEGABYTE // 4)
    peak.note()

    assert peak.bytes is not None
    assert 60 * MEGABYTE < peak.bytes < 128 * MEGABYTE
    assert peak.of_process > 256 * MEGABYTE


def test_what_cannot_be_measured_is_said() -> None:
    """The text says if the kernel does not provide memory accounting."""
    memory = {"predicted": {"weights": 4e6, "gradients": 1.0}, "predicted_bytes": 4e6, "measured_bytes": None}

    assert describe_memory(memory) == "not measured here, 4 MB predicted (weights 4)"
