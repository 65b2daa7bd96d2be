"""The sizes of a model, read from a config or given."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.decoder.decoder import Decoder
from pipelines.planner.configs import read_shape, shape_from
from pipelines.planner.shapes import DecoderShape, shape_of
from pipelines.training.speed import training_flops
from tests.support.engine.attention_shapes import attention_shape
from tests.support.planned_models import LLAMA_2_7B, LLAMA_3_8B, SMOLLM2_135M

SMALL = attention_shape(8, 4, 32, layers=3, vocab_size=1_000, hidden_size=256, intermediate_size=688)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8_192,
    "tie_word_embeddings": True,
}


def config_file(folder: Path, **changes: Any) -> Path:
    """Write a config and return its path."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return path


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "qkv_bias": True, "qk_norm": True}])
def test_parameters_are_the_decoders_own(changes: dict[str, bool]) -> None:
    """Parameter counts equal torch's, including norms and biases."""
    config = replace(SMALL, **changes)
    with torch.device("meta"):
        own = sum(parameter.numel() for parameter in Decoder(config).parameters())

    assert shape_of(config, "x").num_parameters == own


def test_published_models_have_their_published_sizes() -> None:
    """Llama-2-7B, Llama-3-8B and SmolLM2-135M have 6.74, 8.03 and 0.1345 billion parameters."""
    sizes = [shape.num_parameters / 1e9 for shape in (LLAMA_2_7B, LLAMA_3_8B, SMOLLM2_135M)]

    assert [round(size, 4) for size in sizes] == [6.7384, 8.0303, 0.1345]


def test_flops_are_counted_as_the_trainer_counts_them() -> None:
    """Planned and measured MFU use the same FLOPs, except for half a token of attention per row."""
    planned, trained = (
        shape_of(SMALL, "x").training_flops(4 * 512, 512),
        training_flops(SMALL, [512] * 4, 4 * 512 * 1_000),
    )

    assert planned == pytest.approx(trained, rel=1e-3)


def test_a_folder_and_its_config_are_the_same_model(tmp_path: Path) -> None:
    """A config file and its folder give the same shape, named after the folder."""
    path = config_file(tmp_path)

    assert read_shape(path) == read_shape(tmp_path)
    assert (read_shape(tmp_path).name, read_shape(tmp_path).num_parameters) == (tmp_path.name, 134_515_008)


def test_a_model_that_is_no_decoder_keeps_what_is_given() -> None:
    """The activation bytes of a sample are a guess unless given."""
    given, guessed = (shape_from(None, 25.6e6, 8.2e9, size) for size in (1e8, None))

    assert not isinstance(given, DecoderShape)
    assert not isinstance(guessed, DecoderShape)
    assert (given.activation_bytes, given.is_guessed) == (1e8, False)
    assert (guessed.activation_bytes, guessed.is_guessed) == (8.2e7, True)
