"""Converts the metadata of a GGUF file to the configs of a Hugging Face folder. Pure.

Keys are named as in the GGUF specification (ggml-org/ggml, docs/gguf.md). Errors name missing and unsupported keys.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.decoder.config import FAMILIES
from models.decoder.config_values import Raw
from models.decoder.end_tokens import named_ends
from models.decoder.rope_config import yarn_attention_factor
from models.errors import CheckpointError

Metadata = Mapping[str, Any]

_ARCHITECTURES = [name for name, family in FAMILIES.items() if family.gguf_interleaves_heads is not None]
_SHAPE = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("expert_count", "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"), (0,)
    ),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
"""Keys with their neutral values: every other value would change every logit."""
_ROPE = frozenset(
    {
        *("freq_base", "dimension_count", "scale_linear", "scaling.type", "scaling.factor", "scaling.finetuned"),
        *(
            "scaling.original_context_length",
            "scaling.attn_factor",
            "scaling.yarn_ext_factor",
            "scaling.yarn_attn_factor",
        ),
        *("scaling.yarn_beta_fast", "scaling.yarn_beta_slow"),
    }
)
"""The rope keys that are read; an unknown key is rejected."""
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def architecture_of(metadata: Metadata) -> str:
    """Return the model family. Raises CheckpointError if unsupported."""
    family = str(need(metadata, "general.architecture"))
    if family not in _ARCHITECTURES:
        raise CheckpointError(f"architecture {family!r} is not supported, only {' or '.join(_ARCHITECTURES)}")
    return family


def model_config(metadata: Metadata, *, is_tied: bool, rope_factors: np.ndarray | None) -> Raw:
    """Return the content of `config.json`.

    `rope_factors` (K/2,) are the frequency divisors that encode llama3 scaling in GGUF; None without scaling.
    """
    family = architecture_of(metadata)
    for key, allowed in _NEUTRAL.items():
        if (value := metadata.get(f"{family}.{key}")) is not None and value not in allowed:
            raise CheckpointError(f"{family}.{key} {value!r:.80} is not supported")
    raw: Raw = {name: need(metadata, f"{family}.{key}") for name, key in _SHAPE.items()}
    raw["head_dim"] = metadata.get(f"{family}.attention.key_length") or raw["hidden_size"] // raw["num_attention_heads"]
    if metadata.get(f"{family}.attention.value_length", raw["head_dim"]) != raw["head_dim"]:
        raise CheckpointError(f"{family}.attention.value_length other than key_length is not supported")
    raw["num_key_value_heads"] = metadata.get(f"{family}.attention.head_count_kv") or raw["num_attention_heads"]
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "hidden_act": "silu",
        "vocab_size": len(need(metadata, "tokenizer.ggml.tokens")),
        "tie_word_embeddings": is_tied,
        "rope_parameters": _rope(metadata, family, raw["head_dim"], rope_factors),
        "eos_token_id": eos_ids(metadata),
        **raw,
    }


def generation_config(metadata: Metadata) -> Raw:
    """Return the content of `generation_config.json`: the tokens that begin and end a text."""
    config: Raw = {"eos_token_id": eos_ids(metadata)}
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return config if bos is None else {**config, "bos_token_id": int(bos)}


def tokenizer_config(metadata: Metadata) -> Raw:
    """Return the content of `tokenizer_config.json`: special tokens by role, and the chat template."""
    tokens = need(metadata, "tokenizer.ggml.tokens")
    raw: Raw = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, name in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            raw[role] = tokens[int(token_id)]
    template = metadata.get("tokenizer.chat_template")
    return raw if template is None else {**raw, "chat_template": template}


def eos_ids(metadata: Metadata) -> list[int]:
    """Return every token that ends a text or a message: by role, or by name if the file gives it no role."""
    given = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS)
    named = named_ends(enumerate(need(metadata, "tokenizer.ggml.tokens")))
    return sorted({int(token_id) for token_id in given if token_id is not None} | set(named.values()))


def need(metadata: Metadata, key: str) -> Any:
    """Return a value. Raises CheckpointError naming the missing key."""
    if key not in metadata:
        raise CheckpointError(f"key {key} is missing")
    return metadata[key]


def _rope(metadata: Metadata, family: str, head_dim: int, factors: np.ndarray | None) -> Raw:
    """Return `rope_parameters`.

    As in llama.cpp, a factor without a type is linear. Raises CheckpointError for a conflict or an unknown key.
    """
    given = {key.removeprefix(f"{family}.rope."): value for key, value in metadata.items() if ".rope." in key}
    unknown = sorted(given.keys() - _ROPE)
    if unknown:
        raise CheckpointError(f"rope key {unknown[0]} is not supported")
    if given.get("dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{family}.rope.dimension_count other than the head size is not supported")
    theta = {"rope_theta": float(given.get("freq_base", 10_000.0))}
    factor = _rope_factor(given)
    kind = given.get("scaling.type", "linear" if factor != 1.0 else "none")
    if factors is not None and (kind != "none" or factor != 1.0):
        raise CheckpointError("rope_freqs.weight and rope.scaling differ: a file must scale positions in one way")
    if kind == "none" and factor != 1.0:
        raise CheckpointError(f"rope.scaling.type none and a factor of {factor} differ")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"{family}.rope.scaling.type {kind!r} is not supported")
    if kind != "yarn":
        _refuse_yarn_keys(given, kind)
        scaled = {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}
        return theta | (scaled if factors is None else _llama3(theta["rope_theta"], head_dim, factors))
    return theta | _yarn(given, factor)


def _rope_factor(given: Metadata) -> float:
    """Return the factor under its newer or its older name; 1 if absent or 0, which means no scaling."""
    factors = {float(given[name]) or 1.0 for name in ("scaling.factor", "scale_linear") if name in given}
    if len(factors) > 1:
        raise CheckpointError("rope.scaling.factor and rope.scale_linear differ")
    return factors.pop() if factors else 1.0


def _yarn(given: Metadata, factor: float) -> Raw:
    if given.get("scaling.yarn_ext_factor", 1.0) != 1.0:
        raise CheckpointError("rope.scaling.yarn_ext_factor other than 1 is not supported")
    need(given, "scaling.factor" if "scale_linear" not in given else "scale_linear")
    attention = float(given.get("scaling.attn_factor", 1.0)) * float(given.get("scaling.yarn_attn_factor", 1.0))
    optional = {
        "original_max_position_embeddings": given.get("scaling.original_context_length"),
        "beta_fast": given.get("scaling.yarn_beta_fast"),
        "beta_slow": given.get("scaling.yarn_beta_slow"),
        "attention_factor": attention * yarn_attention_factor(factor) if attention != 1.0 else None,
    }
    return {"rope_type": "yarn", "factor": factor, **{k: float(v) for k, v in optional.items() if v is not None}}


def _refuse_yarn_keys(given: Metadata, kind: str) -> None:
    for name in ("scaling.attn_factor", "scaling.yarn_attn_factor"):
        if given.get(name, 1.0) != 1.0:
            raise CheckpointError(f"rope.{name} is not supported with rope.scaling.type {kind}")


def _llama3(theta: float, head_dim: int, factors: np.ndarray) -> Raw:
    """Derive llama3 scaling from its frequency divisors: all releases differ only in the factor."""
    factor = float(factors.max())
    lengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    trained = _LLAMA3["original_max_position_embeddings"]
    low, high = trained / _LLAMA3["low_freq_factor"], trained / _LLAMA3["high_freq_factor"]
    share = (trained / lengths - _LLAMA3["low_freq_factor"]) / (
        _LLAMA3["high_freq_factor"] - _LLAMA3["low_freq_factor"]
    )
    between = 1 / ((1 - share) / factor + share)
    wanted = np.where(lengths < high, 1.0, np.where(lengths > low, factor, between))
    if not np.allclose(wanted, factors, rtol=1e-3):
        raise CheckpointError("rope_freqs.weight scales positions in a way that is not supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
