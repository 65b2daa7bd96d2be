"""The shape of a decoder, and its `config.json` in Hugging Face's keys. Pure: no torch, no weights.

`FAMILIES` lists the supported model families and what each fixes. A checkpoint that asks for anything else (another activation,
another scaling of positions) is refused with the name of the key.

`attention_sinks` is a key of our own: the number of first positions that layers with a sliding window see in addition to it.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from models.decoder.window import Window
from models.errors import CheckpointError

Raw = dict[str, Any]
RopeKind = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a model family fixes beyond the shape in `config.json`.

    `window`: whether layers may have a sliding window: never, all of them if `sliding_window` is set, or only if
    `use_sliding_window` is set as well. `gguf_interleaves_heads`: GGUF stores the rows of query and key heads as neighbouring
    rope pairs instead of halves; None if GGUF has no architecture of this name.
    """

    architecture: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    window: Literal["never", "always", "optional"] = "never"
    gguf_interleaves_heads: bool | None = None


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", gguf_interleaves_heads=True),
    "mistral": Family(architecture="MistralForCausalLM", window="always"),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", has_qkv_bias=True, window="optional", gguf_interleaves_heads=False
    ),
    "qwen3": Family(architecture="Qwen3ForCausalLM", has_qk_norm=True, window="optional", gguf_interleaves_heads=False),
}
"""By `model_type`. A new family is a row here; a new tensor of a layer is a row in `layer.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rope periods are lengthened by up to `factor`.

    `original_positions` is the trained length. llama3 keeps pairs that rotate more than `high_freq_factor` times within it and
    lengthens fully those that rotate less than `low_freq_factor` times; YaRN does so at `beta_fast` and `beta_slow` rotations, and
    multiplies cosine and sine by `attention_factor`.
    """

    kind: RopeKind
    factor: float
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary positions of a checkpoint: the base of the periods, and their scaling, if any."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, mostly under the key names of a Hugging Face `config.json`.

    `qkv_bias` and `output_bias` are those of attention; `qk_norm` normalises each query and key head before rope. Layers with a
    `window` see a part of their past only; the implementation of attention must apply it.
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
        """Return the window of one layer, None if it sees everything before it."""
        return self.window if self.window is not None and layer in self.window.layers else None

    @property
    def window_of_all(self) -> Window | None:
        """The window if every layer has it: then tokens behind it, except the sinks, are never read again."""
        return self.window if self.window is not None and len(self.window.layers) == self.num_hidden_layers else None


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
_MAX_SIZE, _MAX_LAYERS = 2**24, 1_000
"""Far beyond every decoder; a claimed size must not fill the memory."""
_SAME_NAMES = (*_SHAPE, "rms_norm_eps", "tie_word_embeddings")


def read_config(folder: Path) -> DecoderConfig:
    """Read `config.json`. Raises CheckpointError naming the key that is missing or not supported."""
    path = folder / "config.json"
    try:
        raw: Raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
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
    """Return the content of a `config.json`, which transformers reads, too."""
    family = _family_of(config)
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "hidden_act": "silu",
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": _describe_rope(config.rope),
        **_describe_window(config, FAMILIES[family]),
        **{name: getattr(config, name) for name in _SAME_NAMES},
    }


def yarn_attention_factor(factor: float) -> float:
    """Return YaRN's default factor of cosine and sine."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _family_of(config: DecoderConfig) -> str:
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.output_bias:
        return "qwen2"
    return "llama" if config.window is None else "mistral"


def _config_from(raw: Raw) -> DecoderConfig:
    family = FAMILIES[raw.get("model_type", "llama")]
    num_heads = int(raw["num_attention_heads"])
    has_bias = bool(raw.get("attention_bias", False)) and not family.has_qkv_bias
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
        qkv_bias=has_bias or family.has_qkv_bias,
        output_bias=has_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.has_qk_norm,
        window=_window_from(raw, family),
    )


def _window_from(raw: Raw, family: Family) -> Window | None:
    """Return the sliding window and its layers. If optional, it starts at layer `max_window_layers`."""
    num_layers, is_always = int(raw["num_hidden_layers"]), family.window == "always"
    if num_layers > _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers {num_layers} is over {_MAX_LAYERS}")
    size = raw.get("sliding_window") if is_always or raw.get("use_sliding_window") else None
    first = 0 if is_always else int(raw.get("max_window_layers", 28))
    types = raw.get("layer_types") or [_SLIDING if layer >= first and size else _FULL for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {_SLIDING, _FULL}:
        raise ValueError(f"layer_types {types!r} is not supported, only {_SLIDING} or {_FULL} for each layer")
    layers = frozenset(layer for layer, kind in enumerate(types) if kind == _SLIDING)
    if layers and not size:
        raise ValueError("layer_types asks for sliding_attention, and sliding_window is not set")
    return Window(int(size), layers, int(raw.get("attention_sinks", 0))) if size and layers else None


def _rope_from(raw: Raw) -> Rope:
    """Return rope's base and scaling. Older files keep the scaling under `rope_scaling`, with the base beside it."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(raw.get("rope_theta") or given.get("rope_theta") or 10_000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    factor = float(given["factor"])
    options = {name: float(given[name]) for name in _scaling_options(kind) if given.get(name) is not None}
    if kind == "yarn":
        options.setdefault("attention_factor", yarn_attention_factor(factor))
    trained = given.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    return Rope(theta, RopeScaling(kind=_SCALINGS[kind], factor=factor, original_positions=int(trained), **options))


def _scaling_options(kind: str) -> tuple[str, ...]:
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
        **{name: getattr(scaling, name) for name in _scaling_options(scaling.kind)},
    }


def _describe_window(config: DecoderConfig, family: Family) -> Raw:
    """Return the window's keys; without `layer_types` a window that is always on applies to every layer."""
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
    """Refuse impossible shapes, with which kernels would read out of bounds or skip heads."""
    for name in _SHAPE:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} {getattr(config, name)} is not positive")
        if getattr(config, name) > _MAX_SIZE:
            raise ValueError(f"{name} {getattr(config, name)} is over {_MAX_SIZE}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(f"num_attention_heads is no multiple of num_key_value_heads {config.num_key_value_heads}")
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd")


def _refuse_unsupported(raw: Raw) -> None:
    family = raw.get("model_type", "llama")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    supported: dict[str, tuple[object, tuple[object, ...]]] = {
        "model_type": (family, tuple(FAMILIES)),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), ("default", *_SCALINGS)),
        "rope mscale": (rope.get("mscale"), (None,)),
        "rope truncate": (rope.get("truncate", True), (True,)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)), (1.0,)),
        "hidden_act": (raw.get("hidden_act", "silu"), ("silu",)),
        "use_sliding_window": (
            bool(raw.get("use_sliding_window", False)),
            (False, True) if family in FAMILIES and FAMILIES[family].window == "optional" else (False,),
        ),
    }
    for key, (found, allowed) in supported.items():
        if found not in allowed:
            raise ValueError(f"{key} {found!r} is not supported, only {' or '.join(map(repr, allowed))}")
