"""The shape of a decoder, and its `config.json` in Hugging Face's keys. Pure: no torch, no weights.

`FAMILIES` lists the supported model families and what each fixes. A checkpoint that asks for anything else (another
activation, another scaling of positions) is rejected with the name of the key.

`attention_sinks` is a key of our own: the number of first positions that layers with a sliding window see in addition
to it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from models.decoder.config_values import Raw, flag, integer, positive
from models.decoder.rope_config import Rope, describe_rope, read_rope
from models.decoder.window import Window
from models.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The parts of a model that its family fixes, beyond the shape in `config.json`.

    `window`: whether layers may have a sliding window: never, all of them if `sliding_window` is set, or only if
    `use_sliding_window` is set as well. `gguf_interleaves_heads`: GGUF stores the rows of query and key heads as
    neighbouring rope pairs instead of halves; None if GGUF has no architecture of this name. `defaults` are the values
    of absent keys, as in transformers' configuration class.
    """

    architecture: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    window: Literal["never", "always", "optional"] = "never"
    gguf_interleaves_heads: bool | None = None
    defaults: Mapping[str, int]


_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2_048,
}
_MISTRAL = {
    **_LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4_096,
}
_QWEN = {
    **_LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4_096,
}
FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", gguf_interleaves_heads=True, defaults=_LLAMA),
    "mistral": Family(architecture="MistralForCausalLM", window="always", defaults=_MISTRAL),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        has_qkv_bias=True,
        window="optional",
        gguf_interleaves_heads=False,
        defaults=_QWEN,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        has_qk_norm=True,
        window="optional",
        gguf_interleaves_heads=False,
        defaults={**_QWEN, "head_dim": 128},
    ),
}
"""Families by `model_type`. A new family is a row here; a new tensor of a layer is a row in `layer.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, mostly under the key names of a Hugging Face `config.json`.

    `qkv_bias` and `output_bias` belong to attention; `qk_norm` normalises each query and key head before rope. Layers
    with a `window` see only a part of their past; the attention implementation must apply it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: Rope = field(default_factory=Rope)
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: Window | None = None

    def window_of(self, layer: int) -> Window | None:
        """Return the window of a layer; None for full attention."""
        return self.window if self.window is not None and layer in self.window.layers else None

    @property
    def window_of_all(self) -> Window | None:
        """The window if every layer has it; then tokens behind it, except the sinks, are never read again."""
        return self.window if self.window is not None and len(self.window.layers) == self.num_hidden_layers else None


_SLIDING, _FULL = "sliding_attention", "full_attention"
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
_MAX_SIZE, _MAX_LAYERS = 2**24, 1_000
"""Far above every real decoder; a claimed size must not exhaust memory."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), (None,)),
    **dict.fromkeys(("attention_multiplier", "clip_qkv", "no_rope_layers", "no_rope_layer_interval"), (None,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (None, 1)),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), (None, 0)),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "rope_interleaved", "parallel_attn", "alibi"), (None, False)),
    "is_causal": (None, True),
}
"""Keys of other families, with their neutral values: every other value would change every logit."""
_SAME_NAMES = (*_SHAPE, "rms_norm_eps", "tie_word_embeddings")


def read_config(folder: Path) -> DecoderConfig:
    """Read `config.json`. Raises CheckpointError naming the missing or unsupported key."""
    path = folder / "config.json"
    try:
        raw: Raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable config ({error})") from error
    try:
        family = _read_family(raw)
        _refuse_unsupported(raw, family)
        config = _config_from({**FAMILIES[family].defaults, **raw}, FAMILIES[family])
        _refuse_impossible(config)
    except KeyError as error:
        raise CheckpointError(f"{path}: key {error.args[0]} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: not a decoder's config ({error})") from error
    return config


def describe_config(config: DecoderConfig) -> Raw:
    """Return the content of a `config.json`, readable by transformers."""
    family = _family_of(config)
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "hidden_act": "silu",
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": describe_rope(config.rope),
        **_describe_window(config, FAMILIES[family]),
        **{name: getattr(config, name) for name in _SAME_NAMES},
    }


def _family_of(config: DecoderConfig) -> str:
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.output_bias:
        return "qwen2"
    return "llama" if config.window is None else "mistral"


def _read_family(raw: Raw) -> str:
    """Return `model_type`, or the type implied by `architectures` if absent.

    Raises ValueError if unsupported or contradictory.
    """
    architectures = raw.get("architectures") or ()
    named = [name for name, family in FAMILIES.items() if family.architecture in architectures]
    family = raw.get("model_type") or next(iter(named), None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type {family!r:.80} is not supported, only {' or '.join(map(repr, FAMILIES))}")
    if named and family not in named:
        raise ValueError(f"model_type {family!r} and architectures {architectures!r:.80} differ")
    return family


def _config_from(raw: Raw, family: Family) -> DecoderConfig:
    num_heads = integer(raw, "num_attention_heads")
    has_bias = flag(raw, "attention_bias") and not family.has_qkv_bias
    max_positions = integer(raw, "max_position_embeddings")
    return DecoderConfig(
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        intermediate_size=integer(raw, "intermediate_size"),
        num_hidden_layers=integer(raw, "num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=_optional(raw, "num_key_value_heads", num_heads),
        head_dim=_optional(raw, "head_dim", integer(raw, "hidden_size") // max(num_heads, 1)),
        max_position_embeddings=max_positions,
        rope=read_rope(raw, max_positions),
        rms_norm_eps=positive(raw, "rms_norm_eps", 1e-6),
        tie_word_embeddings=flag(raw, "tie_word_embeddings"),
        qkv_bias=has_bias or family.has_qkv_bias,
        output_bias=has_bias,
        mlp_bias=flag(raw, "mlp_bias"),
        qk_norm=family.has_qk_norm,
        window=_read_window(raw, family),
    )


def _optional(raw: Raw, key: str, derived: int) -> int:
    """Return a derived size if the key is absent or null."""
    return integer(raw, key) if raw.get(key) is not None else derived


def _read_window(raw: Raw, family: Family) -> Window | None:
    """Return the sliding window and its layers. If optional, it starts at layer `max_window_layers`."""
    num_layers, is_always = integer(raw, "num_hidden_layers"), family.window == "always"
    if num_layers > _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers {num_layers} is over {_MAX_LAYERS}")
    has_window = is_always or flag(raw, "use_sliding_window")
    size = integer(raw, "sliding_window") if has_window and raw.get("sliding_window") is not None else None
    first = 0 if is_always else integer(raw, "max_window_layers", 28)
    types = raw.get("layer_types") or [_SLIDING if layer >= first and size else _FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {_SLIDING, _FULL}:
        raise ValueError(f"layer_types {types!r:.200} is not supported, only {_SLIDING} or {_FULL} for each layer")
    layers = frozenset(layer for layer, kind in enumerate(types) if kind == _SLIDING)
    if layers and not size:
        raise ValueError("layer_types asks for sliding_attention, and sliding_window is not set")
    if size is not None and size < 1:
        raise ValueError(f"sliding_window {size} is not positive")
    num_sinks = integer(raw, "attention_sinks", 0)
    if num_sinks < 0:
        raise ValueError(f"attention_sinks {num_sinks} is negative")
    return Window(size, layers, num_sinks) if size and layers else None


def _describe_window(config: DecoderConfig, family: Family) -> Raw:
    """Return the window's keys; without `layer_types`, an always-on window applies to every layer."""
    window = config.window
    if window is None:
        return {}
    layers = range(config.num_hidden_layers)
    raw: Raw = {"sliding_window": window.size}
    is_always = family.window == "always"
    if not is_always:
        raw |= {"use_sliding_window": True, "max_window_layers": min(window.layers)}
    if not is_always or window.layers != frozenset(layers):
        raw["layer_types"] = [_SLIDING if layer in window.layers else _FULL for layer in layers]
    return raw | ({"attention_sinks": window.num_sinks} if window.num_sinks else {})


def _refuse_impossible(config: DecoderConfig) -> None:
    """Reject impossible shapes: kernels would read out of bounds or skip heads."""
    for name in _SHAPE:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} {getattr(config, name)} is not positive")
        if getattr(config, name) > _MAX_SIZE:
            raise ValueError(f"{name} {getattr(config, name)} is over {_MAX_SIZE}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(f"num_attention_heads is not a multiple of num_key_value_heads {config.num_key_value_heads}")
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd")


def _refuse_unsupported(raw: Raw, family: str) -> None:
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            raise ValueError(
                f"{key}: quantised weights are not supported; give the unquantised checkpoint, or its GGUF"
            )
    has_window = FAMILIES[family].window
    supported: Mapping[str, tuple[object, ...]] = {
        **_NEUTRAL,
        "hidden_act": (None, "silu", "swish"),
        "use_sliding_window": (None, False, True) if has_window == "optional" else (None, False),
        **({"sliding_window": (None,)} if has_window == "never" else {}),
    }
    for key, allowed in supported.items():
        if raw.get(key) not in allowed:
            *_, last = allowed
            raise ValueError(f"{key} {raw[key]!r:.80} is not supported, only {last!r}")
