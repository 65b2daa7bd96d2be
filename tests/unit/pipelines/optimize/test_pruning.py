"""Structured pruning removes unused parts first, and the result is an ordinary checkpoint."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder, save_decoder
from pipelines.optimize.pruning import without_channels, without_heads
from pipelines.scoring.dense import hidden_states
from tests.support.engine.attention_shapes import attention_shape
from tests.support.training.bundles import build_catalogue

CATALOGUE = build_catalogue(26)
HISTORIES = [np.array([1, 2, 3, 4]), np.array([7, 9]), np.array([5, 20, 11])]
TOKENS = torch.randint(0, CATALOGUE.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))


def decoder_of(heads: int, groups: int, *, bias: bool) -> Decoder:
    """Build a decoder with random weights everywhere."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 20, "max_position_embeddings": 64}
    others = {"vocab_size": CATALOGUE.vocab_size, "qkv_bias": bias, "mlp_bias": bias}
    decoder = Decoder(attention_shape(heads, groups, 6, **sizes, **others)).eval()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return decoder


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_channels_that_add_nothing_are_the_ones_that_go(bias: bool) -> None:
    """Removing five dead channels per layer does not change the output."""
    decoder = decoder_of(2, 2, bias=bias)
    for layer, dead in zip(decoder.layers, ([0, 3, 7, 8, 19], [1, 2, 3, 4, 5]), strict=True):
        layer["down"].weight[:, dead] = 0

    pruned = without_channels(decoder, CATALOGUE, HISTORIES, 0.75, 50)

    assert pruned.config == replace(decoder.config, intermediate_size=15)
    torch.testing.assert_close(hidden_states(pruned, TOKENS), hidden_states(decoder, TOKENS))


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 4)])
@torch.no_grad()
def test_heads_go_with_their_keys_and_values(heads: int, groups: int) -> None:
    """Removing a dead group of heads per layer does not change the output, with or without grouping."""
    decoder = decoder_of(heads, groups, bias=True)
    width = heads // groups * 6
    for layer, dead in zip(decoder.layers, (0, 2), strict=True):
        layer["output"].weight[:, dead * width : (dead + 1) * width] = 0

    pruned = without_heads(decoder, CATALOGUE, HISTORIES, 0.75, 50)

    assert (pruned.config.num_key_value_heads, pruned.config.num_attention_heads) == (3, 3 * heads // groups)
    torch.testing.assert_close(hidden_states(pruned, TOKENS), hidden_states(decoder, TOKENS))


@torch.no_grad()
def test_what_is_left_is_an_ordinary_checkpoint(tmp_path) -> None:
    """The pruned decoder is saved and loaded in Hugging Face's layout, with the smaller shape in its config."""
    pruned = without_heads(
        without_channels(decoder_of(4, 2, bias=False), CATALOGUE, HISTORIES, 0.5, 50), CATALOGUE, HISTORIES, 0.5, 50
    )

    save_decoder(pruned, tmp_path)

    read = load_decoder(tmp_path, torch.float32, "cpu")
    assert read.config == pruned.config
    torch.testing.assert_close(hidden_states(read, TOKENS), hidden_states(pruned, TOKENS))
