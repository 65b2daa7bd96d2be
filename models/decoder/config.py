"""A checkpoint's `config.json`, in the words of Hugging Face, to and from the shape of a decoder.

Knows the Llama, Mistral (Llama with a sliding window), Qwen2 and Qwen3 families. What a checkpoint asks for and the decoder
cannot do (another activation, another way to scale positions) is refused by its key, never ignored. Reads no weights.

`attention_sinks` is a key of our own: how many first positions the layers with a sliding window see besides it.
"""

import json
from pathlib import Path
from typing import Any

from models.decoder.decoder import DecoderConfig
from models.decoder.rope import Rope, RopeKind, RopeScaling, yarn_attention_factor
from models.decoder.window import Window
from services.errors import CheckpointError

Raw = dict[str, Any]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_SCALINGS: dict[str, RopeKind] = {"linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_SAME_NAMES = (
    *_SHAPE,
    "rms_norm_eps",
    "tie_word_embeddings",
)


def read_config(folder: Path) -> DecoderConfig:
    """Read `config.json`. Raises CheckpointError naming the key that is missing or asks for what is not supported."""
    path = folder / "config.json"
    try:
        raw: Raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable config ({error})") from error
    try:
        _refuse_unsupported(raw)
        config = _config_from(raw)
        _refuse_impossible(config)
    except KeyError as error:
        raise CheckpointError(f"{path}: key {error.args[0]} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: not a decoder's config ({error})") from error
    return config


def describe_config(config: DecoderConfig) -> Raw:
    """Return the content of a `config.json` that transformers reads, too."""
    plain = "llama" if config.window is None else "mistral"
    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias and not config.output_bias else plain
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": _describe_rope(config.rope),
        **_describe_window(config, family),
        **{name: getattr(config, name) for name in _SAME_NAMES},
    }


def _config_from(raw: Raw) -> DecoderConfig:
    family = raw.get("model_type", "llama")
    num_heads = int(raw["num_attention_heads"])
    has_bias = bool(raw.get("attention_bias", False)) and family != "qwen2"
    return DecoderConfig(
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_hidden_layers=int(raw["num_hidden_layers"]),
        num_attention_heads=num_heads,
        num_key_value_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // num_heads),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        rope=_rope_from(raw),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=has_bias or family == "qwen2",
        output_bias=has_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        window=_window_from(raw, family),
    )


def _window_from(raw: Raw, family: str) -> Window | None:
    """Read which layers have a window. A Qwen's is off unless it says so, and then begins at layer `max_window_layers`."""
    num_layers = int(raw["num_hidden_layers"])
    size = raw.get("sliding_window") if family == "mistral" or raw.get("use_sliding_window") else None
    first = 0 if family == "mistral" else int(raw.get("max_window_layers", 28))
    types = raw.get("layer_types") or [_SLIDING if layer >= first and size else _FULL for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {_SLIDING, _FULL}:
        raise ValueError(f"layer_types {types!r} is not supported, only {_SLIDING} or {_FULL} for each layer")
    layers = frozenset(layer for layer, kind in enumerate(types) if kind == _SLIDING)
    if layers and not size:
        raise ValueError("layer_types asks for sliding_attention, and sliding_window is not set")
    return Window(int(size), layers, int(raw.get("attention_sinks", 0))) if size and layers else None


def _rope_from(raw: Raw) -> Rope:
    """Read the positions' scaling, which older files keep under `rope_scaling`, with the base beside it."""
    asked = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(raw.get("rope_theta") or asked.get("rope_theta") or 10_000.0)
    kind = asked.get("rope_type", asked.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    factor = float(asked["factor"])
    given = {name: float(asked[name]) for name in _optional(kind) if asked.get(name) is not None}
    if kind == "yarn":
        given.setdefault("attention_factor", yarn_attention_factor(factor))
    trained = asked.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    return Rope(theta, RopeScaling(kind=_SCALINGS[kind], factor=factor, original_positions=int(trained), **given))


def _optional(kind: str) -> tuple[str, ...]:
    if kind == "llama3":
        return ("low_freq_factor", "high_freq_factor")
    return ("beta_fast", "beta_slow", "attention_factor") if kind == "yarn" else ()


def _describe_rope(rope: Rope) -> Raw:
    scaling = rope.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": scaling.kind,
        "rope_theta": rope.theta,
        "factor": scaling.factor,
        **({} if scaling.kind == "linear" else {"original_max_position_embeddings": scaling.original_positions}),
        **{name: getattr(scaling, name) for name in _optional(scaling.kind)},
    }


def _describe_window(config: DecoderConfig, family: str) -> Raw:
    """Say the window in the family's words: a Mistral's is every layer's, and null if it has none."""
    window = config.window
    if window is None:
        return {}
    layers = range(config.num_hidden_layers)
    told: Raw = {"sliding_window": window.size}
    if family != "mistral":
        told |= {"use_sliding_window": True, "max_window_layers": min(window.layers)}
    if family != "mistral" or window.layers != frozenset(layers):
        told["layer_types"] = [_SLIDING if layer in window.layers else _FULL for layer in layers]
    return told | ({"attention_sinks": window.num_sinks} if window.num_sinks else {})


def _refuse_impossible(config: DecoderConfig) -> None:
    """Refuse a shape that no decoder has, which kernels would read beyond or leave heads of out."""
    for name in _SHAPE:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} {getattr(config, name)} is not positive")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(f"num_attention_heads is no multiple of num_key_value_heads {config.num_key_value_heads}")
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd")


def _refuse_unsupported(raw: Raw) -> None:
    family = raw.get("model_type", "llama")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    supported: dict[str, tuple[object, tuple[object, ...]]] = {
        "model_type": (family, tuple(_ARCHITECTURES)),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), ("default", *_SCALINGS)),
        "rope mscale": (rope.get("mscale"), (None,)),
        "rope truncate": (rope.get("truncate", True), (True,)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)), (1.0,)),
        "hidden_act": (raw.get("hidden_act", "silu"), ("silu",)),
        "use_sliding_window": (
            bool(raw.get("use_sliding_window", False)),
            (False, True) if family.startswith("qwen") else (False,),
        ),
    }
    for key, (found, served) in supported.items():
        if found not in served:
            raise ValueError(f"{key} {found!r} is not supported, only {' or '.join(map(repr, served))}")
