"""Converts a GGUF file to a Hugging Face folder that `load_decoder` reads: weights, configs and tokenizer.

Weights are dequantised to fp32, which represents the stored values exactly. For Llama, GGUF stores the rows of query
and key heads as neighbouring rope pairs (llama.cpp) instead of halves (Hugging Face); the order is restored. The `gguf`
package is imported lazily.
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

from models.decoder.config import FAMILIES
from models.decoder.gguf_config import generation_config, model_config, tokenizer_config
from models.decoder.gguf_tokenizer import build_tokenizer
from models.decoder.layer import LAYER, LAYER_PREFIX, OUTSIDE_LAYERS, Projection
from models.errors import CheckpointError

_ROPE_FACTORS = "rope_freqs.weight"
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
_CHECKPOINT_MODULES = {row.gguf: row.checkpoint for row in LAYER} | {
    gguf: checkpoint for checkpoint, gguf in OUTSIDE_LAYERS.values()
}
_SHARD_BYTES = 2 * 1024**3
_MAX_VALUES = 4_000_000
"""Twice the need of the largest vocabularies: two values per text, one per number."""

ConversionProgress = Callable[[int, int], None]
"""(number of tensors done, total number of tensors)."""


def convert_gguf(path: Path, folder: Path, progress: ConversionProgress) -> None:
    """Write the folder, which must be empty or absent.

    Raises CheckpointError naming the missing or unsupported part.
    """
    try:
        reader = _bounded_reader()(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # the reader checks little, so broken bytes can fail anywhere in it
        raise CheckpointError(f"{path}: not readable as GGUF ({error!r})") from error
    stored = {tensor.name: tensor for tensor in reader.tensors}
    try:
        _write(metadata, stored, folder, progress)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{path}: a value is of the wrong type, size or range ({error!r})") from error


def _bounded_reader() -> Any:
    """Return a reader that rejects reads past the end of the file, and more values than memory should hold.

    The package's reader returns empty arrays for missing bytes, so a claimed size of 10^12 values would exhaust memory.
    """
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):
        num_values = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.num_values += 1
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"cut off: a value at byte {offset} ends behind the file's end")
            if self.num_values > _MAX_VALUES:
                raise ValueError(f"more than {_MAX_VALUES} values of metadata")
            return super()._get(offset, dtype, count, override_order)

    return BoundedReader


def _write(metadata: Mapping[str, Any], stored: Mapping[str, Any], folder: Path, progress: ConversionProgress) -> None:
    factors = _values(stored[_ROPE_FACTORS]) if _ROPE_FACTORS in stored else None
    config = model_config(metadata, is_tied=f"{OUTSIDE_LAYERS['head'][1]}.weight" not in stored, rope_factors=factors)
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _save_weights(_tensors(stored, config, progress), folder)
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation_config(metadata)),
        ("tokenizer_config.json", tokenizer_config(metadata)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False))


def _tensors(
    stored: Mapping[str, Any], config: Mapping[str, Any], progress: ConversionProgress
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under their Hugging Face checkpoint names."""
    interleaved = {}
    if FAMILIES[config["model_type"]].gguf_interleaves_heads:
        projections = (row for row in LAYER if isinstance(row, Projection))
        interleaved = {row.gguf: config[row.rope_heads] for row in projections if row.rope_heads is not None}
    for done, (name, tensor) in enumerate(stored.items(), start=1):
        if name != _ROPE_FACTORS:
            match = _TENSOR.fullmatch(name)
            module = match and _CHECKPOINT_MODULES.get(match["module"])
            if match is None or module is None:
                raise CheckpointError(f"tensor {name} is not known")
            values = _values(tensor)
            if match["module"] in interleaved:
                values = _in_halves(values, interleaved[match["module"]])
            prefix = "" if match["layer"] is None else LAYER_PREFIX.format(match["layer"])
            yield f"{prefix}{module}.{match['kind']}", torch.from_numpy(np.ascontiguousarray(values))
        progress(done, len(stored))


def _values(tensor: Any) -> np.ndarray:
    """Dequantise one tensor to fp32, outer dimension first."""
    from gguf.quants import dequantize

    try:
        return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        raise CheckpointError(f"tensor {tensor.name}: {tensor.tensor_type.name} is not supported") from error


def _in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from neighbouring pairs to halves. (H * K, ...) -> the same shape."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _save_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write shards of bounded size and their index, so that memory use is bounded by one shard."""
    shard: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}
    num_bytes = num_shards = 0

    def flush() -> None:
        nonlocal num_bytes, num_shards
        num_shards += 1
        file = f"model-{num_shards:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(shard, file))
        shard.clear()
        num_bytes = 0

    for name, tensor in tensors:
        shard[name] = tensor
        num_bytes += tensor.nbytes
        if num_bytes >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
