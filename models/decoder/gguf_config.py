"""Converts the metadata of a GGUF file to the configs of a Hugging Face folder. Pure.

Keys are those of the GGUF specification (ggml-org/ggml, docs/gguf.md). Missing and unsupported keys are named in the error.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from models.decoder.config import FAMILIES, Raw
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
_UNSUPPORTED = ("expert_count", "attention.sliding_window")
_ENDS = ("eos", "eot", "eom")
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def architecture_of(metadata: Metadata) -> str:
    """Return the model family. Raises CheckpointError for one that is not supported."""
    family = str(need(metadata, "general.architecture"))
    if family not in _ARCHITECTURES:
        raise CheckpointError(f"architecture {family!r} is not supported, only {' or '.join(_ARCHITECTURES)}")
    return family


def model_config(metadata: Metadata, *, is_tied: bool, rope_factors: np.ndarray | None) -> Raw:
    """Return the content of `config.json`.

    `rope_factors` (K/2,) are the divisors of the frequencies by which GGUF stores the llama3 scaling, None without it.
    """
    family = architecture_of(metadata)
    for key in _UNSUPPORTED:
        if metadata.get(f"{family}.{key}"):
            raise CheckpointError(f"{family}.{key} is not supported")
    raw: Raw = {name: need(metadata, f"{family}.{key}") for name, key in _SHAPE.items()}
    raw["head_dim"] = metadata.get(f"{family}.attention.key_length") or raw["hidden_size"] // raw["num_attention_heads"]
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
    found: Raw = {"eos_token_id": eos_ids(metadata)}
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return found if bos is None else {**found, "bos_token_id": int(bos)}


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
    """Return every token that ends a text or a message."""
    given = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS)
    return sorted({int(token_id) for token_id in given if token_id is not None})


def need(metadata: Metadata, key: str) -> Any:
    """Return a value. Raises CheckpointError naming the key if it is missing."""
    if key not in metadata:
        raise CheckpointError(f"key {key} is missing")
    return metadata[key]


def _rope(metadata: Metadata, family: str, head_dim: int, factors: np.ndarray | None) -> Raw:
    theta = float(metadata.get(f"{family}.rope.freq_base", 10_000.0))
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if metadata.get(f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{family}.rope.dimension_count other than the head size is not supported")
    if factors is not None:
        return {"rope_theta": theta, **_llama3(theta, head_dim, factors)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{family}.rope.scaling.type {kind!r} is not supported")
    scaled = {
        "rope_theta": theta,
        "rope_type": kind,
        "factor": float(need(metadata, f"{family}.rope.scaling.factor")),
    }
    trained = metadata.get(f"{family}.rope.scaling.original_context_length")
    return scaled if trained is None else {**scaled, "original_max_position_embeddings": int(trained)}


def _llama3(theta: float, head_dim: int, factors: np.ndarray) -> Raw:
    """Derive the llama3 scaling from the divisors of its frequencies: all releases differ in the factor alone."""
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
