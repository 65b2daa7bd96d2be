"""The logits of each model family with each RoPE scaling equal transformers', in fp32."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from models.decoder.decoder import Decoder, RMSNorm
from models.decoder.weights import load_decoder, save_decoder
from models.decoder.window import Window
from models.errors import CheckpointError
from tests.support.engine.hub_models import build_hub_model, largest_difference

LAYER_TYPES = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen3-biased": (Qwen3Config, {"attention_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": 13}),
    "mistral-unlimited": (MistralConfig, {"sliding_window": None}),
    "qwen2-windowed": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-windowed": (Qwen3Config, {"use_sliding_window": True, "sliding_window": 1, "layer_types": LAYER_TYPES}),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn-explicit": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.8},
}


def build(family: str, rope: str, *, tied: bool = True) -> Any:
    """Build a small random model of a family."""
    kind, given = FAMILIES[family]
    return build_hub_model(
        kind,
        head_dim=16 if family.startswith("qwen3") else 8,
        rope_parameters={"rope_theta": 10_000.0, **ROPES[rope]},
        tie_word_embeddings=tied,
        **given,
    )


def cases(*, sample: set[tuple[str, str]]) -> list[Any]:
    """Return every family with every RoPE scaling; cases outside the sample are marked `grid`."""
    return [
        pytest.param(*case, marks=() if case in sample else pytest.mark.grid)
        for case in itertools.product(FAMILIES, ROPES)
    ]


EACH = {(family, "default") for family in FAMILIES} | {("llama", rope) for rope in ROPES}
SOME = {("llama-biased", "llama3"), ("qwen2-windowed", "default"), ("qwen3", "yarn-explicit"), ("mistral", "linear")}


@pytest.mark.parametrize(("family", "rope"), cases(sample=EACH))
def test_logits_equal_transformers(tmp_path: Path, family: str, rope: str) -> None:
    """A folder saved by transformers gives the same logits here, also far beyond the trained length."""
    theirs = build(family, rope)
    theirs.save_pretrained(tmp_path)

    ours = load_decoder(tmp_path, torch.float32, "cpu")

    assert largest_difference(theirs, ours) < 1e-4


@pytest.mark.parametrize(("family", "rope"), cases(sample=SOME))
def test_transformers_reads_what_is_saved(tmp_path: Path, family: str, rope: str) -> None:
    """A folder that we saved gives the same family and logits in transformers, and the same config and weights here."""
    build(family, rope, tied=family == "mistral").save_pretrained(tmp_path / "theirs")
    ours = load_decoder(tmp_path / "theirs", torch.float32, "cpu")

    save_decoder(ours, tmp_path / "ours")

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert again.config.model_type == {"mistral-unlimited": "llama"}.get(family, family.partition("-")[0])
    assert largest_difference(again, ours) < 1e-4
    read = load_decoder(tmp_path / "ours", torch.float32, "cpu")
    assert read.config == ours.config
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_the_older_spelling_of_a_scaling_is_read(tmp_path: Path, rope: str) -> None:
    """`rope_scaling` with `type` and a separate `rope_theta` is equivalent to `rope_parameters`."""
    build("llama", rope).save_pretrained(tmp_path)
    newer = load_decoder(tmp_path, torch.float32, "cpu").config
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    path.write_text(json.dumps(raw))

    older = load_decoder(tmp_path, torch.float32, "cpu").config

    assert older == newer


ABSENT = object()
HEADS = 32
EACH_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
KEYS: dict[str, list[dict[str, Any]]] = {
    "rms_norm_eps": [{"rms_norm_eps": ABSENT}, {"rms_norm_eps": 0.5}],
    "num_key_value_heads": [{"num_key_value_heads": ABSENT}, {"num_key_value_heads": None}],
    "head_dim": [{"head_dim": ABSENT}],
    "rope_theta": [
        {"rope_parameters": ABSENT},
        {"rope_parameters": ABSENT, "rope_theta": 77.0},
        {"rope_theta": 10_000.0},
        {"rope_parameters": {"rope_theta": 77.0}},
        {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 77.0},
        {"rope_parameters": {**YARN, "beta_fast": None}},
        {"rope_parameters": {**YARN, "rope_theta": 77.0, "attention_factor": 2.0}},
        {"rope_parameters": LLAMA3},
    ],
    "max_position_embeddings": [{"max_position_embeddings": ABSENT, "rope_parameters": YARN}],
    "sliding_window": [
        {"sliding_window": ABSENT, "layer_types": ABSENT},
        {"sliding_window": None, "layer_types": ABSENT},
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1, "layer_types": ABSENT},
        {"sliding_window": 5, "use_sliding_window": False, "layer_types": ABSENT},
        {"use_sliding_window": True, "sliding_window": ABSENT, "max_window_layers": 0, "layer_types": ABSENT},
    ],
    "tie_word_embeddings": [{"tie_word_embeddings": ABSENT}, {"tie_word_embeddings": True}],
    "hidden_act": [{"hidden_act": ABSENT}, {"hidden_act": "swish"}],
    "attention_bias": [{"attention_bias": ABSENT, "mlp_bias": ABSENT}],
}
"""Changes to a `config.json`, by the key that they test."""


def key_cases() -> list[Any]:
    """Return every family with every key; cases outside a sample are marked `grid`."""
    sample = {("mistral", "sliding_window"), ("qwen2", "sliding_window"), ("qwen3", "head_dim")}
    sample |= {("llama", key) for key in KEYS}
    return [
        pytest.param(*case, marks=() if case in sample else pytest.mark.grid)
        for case in itertools.product(EACH_FAMILY, KEYS)
    ]


@pytest.fixture(scope="module")
def hub_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder whose shapes fit the family's defaults, for tests that remove keys; embeddings are untied."""
    family = request.param
    key_value_heads = {"mistral": 8}.get(family, HEADS)
    folder = tmp_path_factory.mktemp(family)
    build_hub_model(
        FAMILIES[family][0],
        num_attention_heads=HEADS,
        num_key_value_heads=key_value_heads,
        head_dim=128 if family == "qwen3" else 4,
        hidden_size=4 * HEADS,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return folder


def load_or_refusal(folder: Path) -> Decoder | str:
    try:
        return load_decoder(folder, torch.float32, "cpu")
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize(("hub_folder", "key"), key_cases(), indirect=["hub_folder"])
def test_every_key_that_is_read_means_what_it_means_to_transformers(hub_folder: Path, key: str, tmp_path: Path) -> None:
    """A value, null or absence of a key gives transformers' logits in each family, or an error that names the key."""
    raw = json.loads((hub_folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(hub_folder / "model.safetensors")
    num_equal = 0
    for change in KEYS[key]:
        changed = {name: value for name, value in (raw | change).items() if value is not ABSENT}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        ours = load_or_refusal(tmp_path)
        if isinstance(ours, str):
            assert any(name in ours for name in (*change, "misshapen")), (change, ours)
            continue
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        assert largest_difference(theirs, ours) < 1e-3, change
        num_equal += 1

    assert num_equal


def test_sinks_are_kept_under_a_key_of_our_own(tmp_path: Path) -> None:
    """The number of attention sinks is saved and loaded along with the window."""
    build("qwen2-windowed", "default").save_pretrained(tmp_path / "theirs")
    ours = load_decoder(tmp_path / "theirs", torch.float32, "cpu")
    window = Window(9, frozenset({1}), num_sinks=4)

    save_decoder(Decoder(replace(ours.config, window=window)), tmp_path / "ours")

    assert ours.config.window == Window(9, frozenset({1}))
    assert load_decoder(tmp_path / "ours", torch.float32, "cpu").config.window == window


def test_the_norm_is_computed_in_fp32() -> None:
    """A bf16 row is normalised in fp32 and rounded once at the end."""
    row = torch.randn(3, 64).to(torch.bfloat16)

    normed = RMSNorm(64, 1e-5)(row)

    wanted = row.float() * row.float().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed, wanted.to(torch.bfloat16), atol=0.0, rtol=0.01)
