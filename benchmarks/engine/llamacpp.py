"""llama.cpp in the comparison, in its own environment (`make bench-peers`), through its batch interface.

It runs texts in one batch of all sequences per step, greedy, over the same bf16 weights, written to GGUF without a
tokenizer. It has no beam search over a catalogue.
"""

import ctypes
import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.worker import Reply, Request, serve
from models.decoder.layer import LAYER, OUTSIDE_LAYERS, Projection

_MAX_TOKENS = 8_192
_MAX_SEQUENCES = 64
_OUTSIDE = dict(OUTSIDE_LAYERS.values())
_INSIDE = {row.checkpoint: row for row in LAYER}


class LlamaCppEngine:
    """One model and one context in this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp

        self._lib = llama_cpp
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "model.gguf")
            self._vocab_size = write_gguf(Path(options["model"]), path)
            config = llama_cpp.llama_model_default_params()
            config.use_mmap = False
            self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), config)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context.n_batch = _MAX_TOKENS
        context.n_seq_max = _MAX_SEQUENCES
        context.n_threads = context.n_threads_batch = options["threads"]
        context.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._batch = llama_cpp.llama_batch_init(_MAX_TOKENS, 0, 1)

    def describe(self) -> Reply:
        """Return versions; texts only."""
        return {
            "versions": {"llama-cpp-python": metadata.version("llama-cpp-python")},
            "constraint": "none: no beam search",
        }

    def answer(self, ask: Request) -> Reply:
        """Generate texts greedily. Raises NotImplementedError for rankings."""
        if ask["do"] == "rank":
            raise NotImplementedError("llama.cpp has no beam search")
        prompts: list[list[int]] = ask["prompts"]
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        texts: list[list[int]] = [[] for _ in prompts]
        step = [
            (order, position, token) for order, prompt in enumerate(prompts) for position, token in enumerate(prompt)
        ]
        while step:
            drawn = self._decode(step)
            for order, token in drawn.items():
                texts[order].append(token)
            step = [
                (order, len(prompts[order]) + len(text) - 1, text[-1])
                for order, text in enumerate(texts)
                if order in drawn and len(text) < ask["num_new"][order]
            ]
        return {"outputs": texts}

    def _decode(self, step: list[tuple[int, int, int]]) -> dict[int, int]:
        """Run (sequence, position, token) rows, sequence after sequence; return each one's most likely next token."""
        batch, last = self._batch, {order: row for row, (order, _, _) in enumerate(step)}
        batch.n_tokens = len(step)
        for row, (order, position, token) in enumerate(step):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, order
            batch.logits[row] = last[order] == row
        if failed := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        return {order: int(np.argmax(self._logits(row))) for order, row in last.items()}

    def _logits(self, row: int) -> np.ndarray:
        address = self._lib.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))


def write_gguf(folder: Path, path: Path) -> int:
    """Write an fp32 Llama checkpoint in bf16 as GGUF without a tokenizer. Returns the size of its vocabulary."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    stored = (pair for file in sorted(folder.glob("*.safetensors")) for pair in load_file(file).items())
    for name, values in stored:
        target, rope_heads = _place_of(name)
        if values.ndim == 1:
            writer.add_tensor(target, values)
            continue
        rows = values if rope_heads is None else _interleaved(values, config[rope_heads])
        bf16 = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(target, gguf.quants.quantize(rows, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(config["vocab_size"])


def _place_of(name: str) -> tuple[str, str | None]:
    """Return a tensor's name in GGUF, and the config key of its number of heads if they get rope."""
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}", None
    _, _, layer, inner = module.split(".", 3)
    row = _INSIDE[inner]
    return f"blk.{layer}.{row.gguf}.{kind}", row.rope_heads if isinstance(row, Projection) else None


def _interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows of each head with the halves that rope turns as adjacent pairs, as GGUF has them."""
    halves = values.reshape(num_heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


if __name__ == "__main__":
    serve(LlamaCppEngine)
