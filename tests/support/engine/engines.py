"""Builders of small random decoders, catalogues and engines, and an oracle that scores every item densely."""

from typing import Any

import numpy as np
import torch

from models.decoder.decoder import Decoder
from models.decoder.window import Window
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import EngineOutcome
from tests.support.engine.attention_shapes import attention_shape
from tests.support.engine.dense import hidden_of

SMALL: dict[str, Any] = {
    "block_tokens": 4,
    "num_blocks": 256,
    "tile_tokens": 16,
    "tile_queries": 8,
    "cpu_kernels": "torch",
}
LEVEL_SIZES = {1: (60,), 2: (9, 11), 3: (5, 7, 6), 4: (4, 3, 5, 4)}


def build_items(depth: int, num_items: int = 50, seed: int = 3) -> ItemCodes:
    """Build random codes; some items share a code."""
    rng = np.random.default_rng(seed)
    sizes = LEVEL_SIZES[depth]
    codes = np.stack([rng.integers(0, size, num_items) for size in sizes], axis=1)
    offsets = tuple(1 + sum(sizes[:level]) for level in range(depth))
    return ItemCodes(codes=codes, level_sizes=sizes, token_offsets=offsets)


def build_decoder(
    items: ItemCodes, *, heads: int = 4, kv_heads: int = 2, layers: int = 2, window: Window | None = None
) -> Decoder:
    """Build a random decoder in fp32 over a catalogue's vocabulary."""
    torch.manual_seed(11)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    vocab_size = 1 + sum(items.level_sizes)
    return Decoder(attention_shape(heads, kv_heads, 8, layers, vocab_size=vocab_size, window=window, **sizes)).eval()


def build_engine(decoder: Decoder, items: ItemCodes | None, **knobs: Any) -> Engine:
    """Build an engine on torch's kernels with small blocks; `knobs` are fields of its configuration."""
    return Engine(decoder, EngineConfig(**SMALL | knobs), items=items, bundle_version="v1")


def exhaustive_ranking(
    decoder: Decoder, items: ItemCodes, prompt: list[int], allowed: np.ndarray, k: int
) -> tuple[list[int], np.ndarray]:
    """Score every item by dense decoding after the prompt; best first, ties by index.

    Each code is normalised over the codes of items with the same preceding codes, or over the vocabulary.
    """
    scores = np.full(len(items.codes), -np.inf)
    with torch.inference_mode():
        for code in {tuple(code) for code in items.codes.tolist()}:
            tokens_of_item = [offset + value for offset, value in zip(items.token_offsets, code, strict=True)]
            tokens = torch.tensor(prompt + tokens_of_item[:-1])
            hidden = hidden_of(decoder, tokens)[len(prompt) - 1 :]
            total = 0.0
            for level, (offset, size) in enumerate(zip(items.token_offsets, items.level_sizes, strict=True)):
                logits = hidden[level] @ decoder.head_weight_VD[offset : offset + size].T
                below = items.codes[(items.codes[:, :level] == code[:level]).all(axis=1)]
                nodes = below[:, level] if level == len(code) - 1 else np.unique(below[:, level])
                logits_V = hidden[level] @ decoder.head_weight_VD.T
                norm = logits[torch.from_numpy(nodes).long()] if items.scores == "catalogue" else logits_V
                total += float(logits[code[level]] - norm.logsumexp(-1))
            scores[(items.codes == code).all(axis=1)] = total
    scores[~allowed] = -np.inf
    order = np.argsort(-scores, kind="stable")[: min(k, int(allowed.sum()))]
    return order.tolist(), scores[order]


def drain(engine: Engine, *others: Engine) -> dict[str, EngineOutcome]:
    """Step to the end, checking the integrity of the engine and of the others on its memory after each step."""
    outcomes: dict[str, EngineOutcome] = {}
    while engine.has_work:
        for outcome in engine.step(0.0):
            assert outcome.request_id not in outcomes
            outcomes[outcome.request_id] = outcome
        engine.check_integrity(*others)
    return outcomes
