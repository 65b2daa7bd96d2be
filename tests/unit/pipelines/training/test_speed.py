"""The FLOPs of a training step."""

import pytest
import torch

from models.decoder.decoder import Decoder
from pipelines.training.parallel.mesh import ONE_PROCESS, Mesh, Method
from pipelines.training.speed import decoder_work, speed_of, training_flops
from tests.support.engine.attention_shapes import attention_shape


def test_a_step_counts_its_matrices_its_attention_and_its_softmax() -> None:
    """By hand: 160 weights, windows of 3 and 1 tokens, 3 labels over 10 items, forward and backward."""
    config = attention_shape(2, 2, 2, layers=1, vocab_size=11, hidden_size=4, intermediate_size=8)
    weights = 4 * (4 * 4) + 3 * (4 * 8)
    attention = 2 * 4 * (1 + 2 + 3) + 2 * 4 * 1
    """Scores and sums of width 4, for each token over itself and earlier tokens."""
    softmax = 3 * 10 * 4
    layers = Decoder(config).layers

    assert sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() > 1) == weights == 160
    assert decoder_work(config, 3) + decoder_work(config, 1) == (3 + 1) * weights + attention
    assert training_flops(config, [3, 1], num_scores=3 * 10) == 2 * 3 * (4 * weights + attention + softmax)


def test_a_cpu_has_a_utilisation_of_what_it_was_measured_to_do() -> None:
    """Without a data-sheet peak the MFU is None; recomputation increases only the hardware utilisation."""
    alone, recomputing = ONE_PROCESS, Mesh(method=Method(recompute="full"))

    speed, again = (
        speed_of(num_tokens=100, flops=3_000, seconds=2.0, device=torch.device("cpu"), mesh=mesh)
        for mesh in (alone, recomputing)
    )

    measured = speed["measured_peak_flops_per_s"]
    assert (speed["tokens_per_s"], speed["flops_per_s"], speed["mfu"]) == (50.0, 1_500.0, None)
    assert measured is not None
    assert speed["mfu_of_measured"] == speed["hfu_of_measured"] == pytest.approx(1_500.0 / measured)
    assert again["hfu_of_measured"] == pytest.approx(4 / 3 * (again["mfu_of_measured"] or 0.0))
