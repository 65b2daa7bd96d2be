"""Turns a GGUF file into a Hugging Face folder that `load_decoder` reads: weights, configs and tokenizer.

Weights are de-quantised to fp32, which keeps them exactly; what they were quantised from is lost. The rows of Llama's query
and key projections are stored in another order in GGUF (llama.cpp turns neighbouring pairs, Hugging Face halves) and are
put back. Needs the `gguf` package when called, not when imported.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.decoder.gguf_config import architecture_of, generation_config, model_config, tokenizer_config
from models.decoder.gguf_tokenizer import build_tokenizer
from services.errors import CheckpointError

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_SHARD_BYTES = 2 * 1024**3

Progress = Callable[[int, int], None]
"""(tensors done, tensors in all)."""


def convert_gguf(path: Path, folder: Path, progress: Progress) -> None:
    """Write the folder, which must be empty or absent. Raises CheckpointError naming what is missing or not supported."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path}: not readable as GGUF ({error})") from error
    stored = {tensor.name: tensor for tensor in reader.tensors}
    try:
        _write(metadata, stored, folder, progress)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _write(metadata: Mapping[str, Any], stored: Mapping[str, Any], folder: Path, progress: Progress) -> None:
    factors = _values(stored[_ROPE_FACTORS]) if _ROPE_FACTORS in stored else None
    config = model_config(metadata, is_tied="output.weight" not in stored, rope_factors=factors)
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _save_weights(_tensors(stored, config, progress), folder)
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation_config(metadata)),
        ("tokenizer_config.json", tokenizer_config(metadata)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))


def _tensors(stored: Mapping[str, Any], config: Mapping[str, Any], progress: Progress) -> Iterator[tuple[str, Tensor]]:
    is_permuted = architecture_of({"general.architecture": config["model_type"]}) == "llama"
    heads = {"attn_q.": config["num_attention_heads"], "attn_k.": config["num_key_value_heads"]}
    for done, (name, tensor) in enumerate(stored.items(), start=1):
        if name != _ROPE_FACTORS:
            values = _values(tensor)
            num_heads = next((count for part, count in heads.items() if part in name), None)
            if is_permuted and num_heads is not None:
                values = _in_halves(values, num_heads)
            yield _name_of(name), torch.from_numpy(np.ascontiguousarray(values))
        progress(done, len(stored))


def _name_of(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _IN_LAYER:
        raise CheckpointError(f"tensor {name} is not known")
    return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.{found[3]}"


def _values(tensor: Any) -> np.ndarray:
    """De-quantise one tensor to fp32, outer dimension first."""
    from gguf.quants import dequantize

    try:
        return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        raise CheckpointError(f"tensor {tensor.name}: {tensor.tensor_type.name} is not supported") from error


def _in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of each head from pairs into halves. (H * K, ...) -> the same shape."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _save_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write shards of bounded size and their index, so that a large file needs no more memory than a shard."""
    shard: dict[str, Tensor] = {}
    place_of: dict[str, str] = {}
    num_bytes = num_shards = 0

    def flush() -> None:
        nonlocal num_bytes, num_shards
        num_shards += 1
        file = f"model-{num_shards:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        place_of.update(dict.fromkeys(shard, file))
        shard.clear()
        num_bytes = 0

    for name, tensor in tensors:
        shard[name] = tensor
        num_bytes += tensor.nbytes
        if num_bytes >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": place_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
