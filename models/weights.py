"""A decoder's checkpoint folder in Hugging Face layout: `config.json` and safetensors, in one file or in shards.

Never pickle. It knows the Llama family's key names and nothing of codes, bundles or serving. What a checkpoint asks for
and this decoder cannot do (rope scaling, biases, another activation) is refused by name, never ignored.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.decoder import Decoder, DecoderConfig
from services.errors import CheckpointError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors that old checkpoints store although they follow from the config."""
_SHOWN = 5


def load_decoder(folder: Path, dtype: torch.dtype, device: str | torch.device) -> Decoder:
    """Load a decoder, ready for inference. Raises CheckpointError naming what is missing, unknown, misshapen or unsupported."""
    config = read_config(folder)
    tensors = _read_tensors(folder)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with torch.device("meta"):
        decoder = Decoder(config)
    _check_tensors(folder, decoder.state_dict(), tensors)
    decoder.load_state_dict(tensors, assign=True)
    return decoder.to(device=device, dtype=dtype).eval()


def save_decoder(decoder: Decoder, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` into the folder, which is made if absent. transformers reads them too."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in decoder.state_dict().items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_describe(decoder.config), indent=1, sort_keys=True))


def read_config(folder: Path) -> DecoderConfig:
    """Read `config.json`. Raises CheckpointError naming the key that is missing or asks for what is not supported."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not a readable config ({error})") from error
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    _refuse_unsupported(path, raw, rope)
    try:
        num_heads = int(raw["num_attention_heads"])
        return DecoderConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=num_heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: key {error.args[0]} is missing") from error


def _refuse_unsupported(path: Path, raw: dict[str, Any], rope: dict[str, Any]) -> None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    wanted = {
        "model_type": (raw.get("model_type", "llama"), "llama"),
        "rope_type": (kind, "default"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(raw.get("attention_bias", False)), False),
        "mlp_bias": (bool(raw.get("mlp_bias", False)), False),
    }
    for key, (found, supported) in wanted.items():
        if found != supported:
            raise CheckpointError(f"{path}: {key} {found!r} is not supported, only {supported!r}")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in _shards(folder):
        try:
            tensors.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: not readable as safetensors ({error})") from error
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_DERIVED_SUFFIXES)}


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        return [folder / _WEIGHTS]
    try:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error})") from error
    return [folder / name for name in sorted(set(names.values()))]


def _check_tensors(folder: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    misshapen = [
        f"{name} is {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    complaints = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unknown": sorted(found.keys() - wanted.keys()),
        "misshapen": misshapen,
    }
    said = [f"{what}: {_shorten(names)}" for what, names in complaints.items() if names]
    if said:
        raise CheckpointError(f"{folder}: {'; '.join(said)}")


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _describe(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **{name: getattr(config, name) for name in DecoderConfig.__slots__},
    }
