"""The FLOPs of a training step."""

import torch

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from pipelines.training.speed import decoder_work, speed_of, training_flops


def test_a_step_counts_its_matrices_its_attention_and_its_softmax() -> None:
    """By hand: 160 weights, windows of 3 and 1 tokens, of which 3 are labels among 10 items; forward and backward pass."""
    sizes = {"vocab_size": 11, "hidden_size": 4, "intermediate_size": 8, "max_position_embeddings": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2}
    config = DecoderConfig(num_hidden_layers=1, **sizes, **heads)
    weights = 4 * (4 * 4) + 3 * (4 * 8)
    attention = 2 * 4 * (1 + 2 + 3) + 2 * 4 * 1
    """Scores and sums of width 4, each token over itself and those before it."""
    softmax = 3 * 10 * 4
    layers = Decoder(config).layers

    assert sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() > 1) == weights == 160
    assert decoder_work(config, 3) + decoder_work(config, 1) == (3 + 1) * weights + attention
    assert training_flops(config, [3, 1], num_scores=3 * 10) == 2 * 3 * (4 * weights + attention + softmax)


def test_a_cpu_has_no_utilisation() -> None:
    """It is of a data sheet's peak, and null without one; the rates are known anyhow."""
    speed = speed_of(num_tokens=100, flops=3_000, seconds=2.0, device=torch.device("cpu"))

    assert speed == {"tokens_per_s": 50.0, "flops_per_s": 1_500.0, "mfu": None}
