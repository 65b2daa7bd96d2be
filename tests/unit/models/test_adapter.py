"""Adapters in PEFT's folder layout: saved weights are read back equal; unsupported weights are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.decoder.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter, save_adapter
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder, save_decoder
from models.errors import CheckpointError
from tests.support.engine.adapters import build_adapter, merged
from tests.support.engine.engines import build_decoder, build_items

MODULE = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def decoder() -> Decoder:
    """A small random decoder."""
    return build_decoder(build_items(1))


def write_by_hand(folder: Path, decoder: Decoder, rank: int = 2, **about: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the folder that PEFT's save_pretrained writes for one projection, and return its matrices."""
    torch.manual_seed(0)
    low = torch.randn(rank, decoder.config.hidden_size)
    high = torch.randn(decoder.config.num_attention_heads * decoder.config.head_dim, rank)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config | about))
    names = {f"base_model.model.{MODULE}.lora_{part}.weight": matrix for part, matrix in (("A", low), ("B", high))}
    save_file(names, folder / ADAPTER_WEIGHTS)
    return low, high


@pytest.mark.parametrize(
    ("about", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 8}}, 4.0),
        ({"r": 4, "rank_pattern": {"layers.0.self_attn.q_proj": 2}}, 3.0),
    ],
)
def test_a_folder_of_peft_is_added_to_the_decoder_that_it_lies_in(tmp_path, decoder, about, scale) -> None:
    """`load_decoder` returns W + scale B A, with alpha / r, alpha / sqrt(r) and patterns; without the adapter, W."""
    save_decoder(decoder, tmp_path)
    low, high = write_by_hand(tmp_path / ADAPTER, decoder, **about)

    weights = {
        with_adapter: load_decoder(tmp_path, torch.float32, "cpu", with_adapter=with_adapter).layers[0]["q"].weight
        for with_adapter in (True, False)
    }

    torch.testing.assert_close(weights[True], decoder.layers[0]["q"].weight + scale * high @ low)
    assert torch.equal(weights[False], decoder.layers[0]["q"].weight)


def test_a_saved_adapter_is_read_alike(tmp_path, decoder) -> None:
    """Matrices, ranks and factors of all projections survive a round trip, ranks that differ as patterns."""
    adapter = build_adapter(decoder, 4, 1)
    narrow = build_adapter(decoder, 2, 2, ("v",))
    adapter = type(adapter)(pairs={**adapter.pairs, **narrow.pairs}, base="20260101T000000Z-abc")
    save_adapter(adapter, decoder.config, tmp_path)

    loaded = read_adapter(tmp_path, decoder.config)
    assert (loaded.base, loaded.rank) == (adapter.base, 4)
    for parameter, other in zip(
        merged(decoder, loaded).parameters(), merged(decoder, adapter).parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, other)
    about = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    assert about["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def edit(**values: Any) -> Callable[[Path], object]:
    """Return a change of adapter_config.json."""

    def change(folder: Path) -> None:
        path = folder / ADAPTER_CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def retensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Return a change of the adapter's tensors."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        change(tensors)
        save_file(tensors, folder / ADAPTER_WEIGHTS)

    return write


NAME = f"base_model.model.{MODULE}.lora_B.weight"
REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another method": (edit(peft_type="IA3"), "peft_type"),
    "DoRA": (edit(use_dora=True), "use_dora"),
    "biases": (edit(bias="all"), "bias"),
    "whole modules": (edit(modules_to_save=["lm_head"]), "modules_to_save"),
    "a changed base": (edit(init_lora_weights="pissa_niter_4"), "init_lora_weights"),
    "transposed weights": (edit(fan_in_fan_out=True), "fan_in_fan_out"),
    "no rank": (edit(r=0), "r"),
    "another rank": (edit(r=3), MODULE),
    "a text for alpha": (edit(lora_alpha="16"), "lora_alpha"),
    "no JSON": (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), ADAPTER_CONFIG),
    "a pickle": (lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), ADAPTER_WEIGHTS),
    "half a pair": (retensor(lambda tensors: tensors.pop(NAME)), MODULE),
    "an embedding": (
        retensor(
            lambda tensors: tensors.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(1, 1)})
        ),
        "model.embed_tokens",
    ),
    "a head": (
        retensor(lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(1, 1)})),
        "lm_head.weight",
    ),
    "another width": (retensor(lambda tensors: tensors.update({NAME: torch.ones(7, 2)})), MODULE),
    "no numbers": (retensor(lambda tensors: tensors[NAME].fill_(float("nan"))), MODULE),
}


@pytest.mark.parametrize(("damage", "field"), REFUSALS.values(), ids=list(REFUSALS))
def test_what_cannot_be_added_is_refused_by_name(tmp_path, decoder, damage, field) -> None:
    """The error names the file, the field or module, and the fix."""
    write_by_hand(tmp_path, decoder)
    damage(tmp_path)

    with pytest.raises(CheckpointError) as caught:
        read_adapter(tmp_path, decoder.config)
    assert f"{field}: " in str(caught.value)
    assert "; " in str(caught.value)
