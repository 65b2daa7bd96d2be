"""Parameters that a model family fixes beyond the keys of its `config.json`: biases, norms, windows, experts.

Pure data. `families.json` has the defaults of absent keys, by `model_type`. Both are transformers' own: a test counts
the parameters of its models.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

Flag = bool | str
"""A fixed answer, or the config key that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFamily:
    """Parameters of a layer that no size names.

    `norms` counts the norms of the residual stream in a layer. `qk_norm` normalises queries and keys over a head, over
    all heads together, or over each head with weights of its own; `qk_norm_key` names the key that enables it.
    `positions` is the number of learned rows beyond `max_position_embeddings`, None without learned positions.
    `window`: whether `sliding_window` applies never, to all layers, to the layers from `max_window_layers` on, or to
    all but each `window_period`-th.
    """

    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    is_gated: bool = True
    norms: int = 2
    norm_bias: Flag = False
    norm_weight: bool = True
    has_final_norm: bool = True
    qk_norm: Literal["", "head", "width"] = ""
    qk_norm_key: str = ""
    qk_norm_bias: bool = False
    has_embedding_norm: bool = False
    head_bias: Flag = False
    positions: int | None = None
    window: Literal["never", "all", "late", "period"] = "never"
    window_period: int = 0
    has_sinks: bool = False
    has_expert_bias: bool = False
    has_router_bias: bool = False
    has_shared_gate: bool = False
    shared_experts: int = 0
    layer_numbers: int = 0
    """Single numbers of a layer, such as a learned activation's."""


_ATTENTION = LayerFamily(qkv_bias="attention_bias", out_bias="attention_bias")
_LLAMA = replace(_ATTENTION, mlp_bias="mlp_bias")
_GPT2 = LayerFamily(qkv_bias=True, out_bias=True, mlp_bias=True, is_gated=False, norm_bias=True, positions=0)
_GPTJ = LayerFamily(mlp_bias=True, is_gated=False, norms=1, norm_bias=True, head_bias=True)
_WINDOWED = LayerFamily(window="all")

FAMILIES: Mapping[str, LayerFamily] = {
    "apertus": replace(_ATTENTION, is_gated=False, qk_norm="head", layer_numbers=2),
    "arcee": replace(_LLAMA, is_gated=False),
    "baichuan": LayerFamily(),
    "bloom": replace(_GPT2, positions=None, has_embedding_norm=True),
    "chatglm": LayerFamily(qkv_bias="add_qkv_bias"),
    "codegen": _GPTJ,
    "cohere": replace(_ATTENTION, norms=1, qk_norm="width", qk_norm_key="use_qk_norm"),
    "cohere2": replace(_ATTENTION, norms=1, window="period", window_period=4),
    "dbrx": LayerFamily(),
    "deepseek": _ATTENTION,
    "deepseek_v2": _ATTENTION,
    "deepseek_v3": _ATTENTION,
    "dots1": replace(_ATTENTION, qk_norm="head", window="late"),
    "ernie4_5": LayerFamily(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "ernie4_5_moe": LayerFamily(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", head_bias="use_bias", has_router_bias=True
    ),
    "exaone4": LayerFamily(qk_norm="head", window="period"),
    "falcon": LayerFamily(qkv_bias="bias", out_bias="bias", mlp_bias="bias", is_gated=False, norm_bias=True),
    "gemma": _ATTENTION,
    "gemma2": replace(_ATTENTION, norms=4, window="period", window_period=2),
    "gemma3_text": replace(_ATTENTION, norms=4, qk_norm="head", window="period", window_period=6),
    "glm": LayerFamily(qkv_bias="attention_bias"),
    "glm4": LayerFamily(qkv_bias="attention_bias", norms=4),
    "glm4_moe": LayerFamily(qkv_bias="attention_bias", qk_norm="head", qk_norm_key="use_qk_norm"),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": replace(_GPT2, qkv_bias=False),
    "gpt_neox": replace(_GPT2, qkv_bias="attention_bias", out_bias="attention_bias", positions=None),
    "gpt_oss": replace(
        _ATTENTION, window="period", window_period=2, has_sinks=True, has_expert_bias=True, has_router_bias=True
    ),
    "gptj": _GPTJ,
    "granite": _LLAMA,
    "granitemoe": _ATTENTION,
    "helium": _LLAMA,
    "hunyuan_v1_dense": replace(_ATTENTION, qk_norm="head"),
    "internlm2": LayerFamily(qkv_bias="bias", out_bias="bias"),
    "internlm3": LayerFamily(qkv_bias="qkv_bias", out_bias="bias", mlp_bias="bias"),
    "llama": _LLAMA,
    "llama4_text": replace(_ATTENTION, window="period", window_period=4, shared_experts=1),
    "minicpm": _LLAMA,
    "minicpm3": _ATTENTION,
    "minimax_m2": LayerFamily(qk_norm="width"),
    "ministral": _WINDOWED,
    "ministral3": _WINDOWED,
    "mistral": _WINDOWED,
    "mixtral": _WINDOWED,
    "mpt": LayerFamily(is_gated=False),
    "nanochat": LayerFamily(is_gated=False, norm_weight=False),
    "nemotron": replace(_LLAMA, is_gated=False, norm_bias=True),
    "olmo": replace(_ATTENTION, norm_weight=False),
    "olmo2": replace(_ATTENTION, qk_norm="width"),
    "olmo3": replace(_ATTENTION, qk_norm="width", window="period", window_period=4),
    "olmoe": replace(_ATTENTION, qk_norm="width"),
    "opt": LayerFamily(
        qkv_bias="enable_bias",
        out_bias="enable_bias",
        mlp_bias="enable_bias",
        is_gated=False,
        norm_bias=True,
        positions=2,
    ),
    "persimmon": replace(
        _GPT2, positions=None, qk_norm="head", qk_norm_key="qk_layernorm", qk_norm_bias=True, norm_bias=True
    ),
    "phi": replace(
        _GPT2, positions=None, norms=1, head_bias=True, qk_norm="head", qk_norm_key="qk_layernorm", qk_norm_bias=True
    ),
    "phi3": _WINDOWED,
    "phimoe": replace(_ATTENTION, norm_bias=True, head_bias="lm_head_bias", window="all"),
    "qwen": LayerFamily(qkv_bias=True),
    "qwen2": LayerFamily(qkv_bias=True, window="late"),
    "qwen2_moe": LayerFamily(qkv_bias="qkv_bias", window="late", has_shared_gate=True),
    "qwen3": replace(_ATTENTION, qk_norm="head", window="late"),
    "qwen3_moe": replace(_ATTENTION, qk_norm="head", window="late"),
    "seed_oss": LayerFamily(qkv_bias="attention_bias", out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "smollm3": replace(_LLAMA, window="late"),
    "stablelm": LayerFamily(qkv_bias="use_qkv_bias", norm_bias=True, qk_norm="width", qk_norm_key="qk_layernorm"),
    "starcoder2": LayerFamily(
        qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", is_gated=False, norm_bias=True, window="all"
    ),
}
"""By `model_type`. A new family is a row here and its defaults in `families.json`."""

SAME_AS = {
    "kimi_k2": "deepseek_v3",
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "gpt-sw3": "gpt2",
    "yi": "llama",
    "internlm": "llama",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
}
"""Other values of `model_type` for a family of the table."""


@cache
def defaults_of(family: str) -> Mapping[str, Any]:
    """Return the defaults of a family's absent keys, empty for an unknown family."""
    table: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "families.json").read_text())
    return table.get(family, {})
