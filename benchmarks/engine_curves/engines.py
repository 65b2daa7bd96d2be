"""Engines of a small shape with random weights over random catalogues of any size, and timed rankings on them."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.window import Window
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import EngineOutcome

LEVEL_SIZE = 256
BLOCK_TOKENS = 16
_MAX_POSITIONS = 4_096
_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def random_items(num_items: int, depth: int, seed: int = 0, skew: float = 1.0) -> ItemCodes:
    """Draw a catalogue. At depth 1 each item has its own code; at greater depth 256 codes a level, concentrated on small ones by `skew` > 1."""
    rng = np.random.default_rng(seed)
    sizes = (num_items,) if depth == 1 else (LEVEL_SIZE,) * depth
    drawn = (LEVEL_SIZE * rng.random((num_items, depth)) ** skew).astype(np.int32)
    codes = np.arange(num_items, dtype=np.int32)[:, None] if depth == 1 else drawn
    return ItemCodes(
        codes=codes, level_sizes=sizes, token_offsets=tuple(1 + sum(sizes[:level]) for level in range(depth))
    )


def random_decoder(vocab_size: int, window: Window | None = None) -> Decoder:
    """Draw a decoder in fp32."""
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=vocab_size, max_position_embeddings=_MAX_POSITIONS, window=window, **_SHAPE)
    return Decoder(config).eval()


def describe(decoder: Decoder) -> dict[str, Any]:
    """Return the decoder's shape."""
    return _SHAPE | {"parameters": sum(parameter.numel() for parameter in decoder.parameters())}


def build_engine(decoder: Decoder, items: ItemCodes) -> Engine:
    """Build an engine with room for some hundred histories."""
    config = EngineConfig(
        block_tokens=BLOCK_TOKENS, num_blocks=4_096, max_num_batched_tokens=4_096, max_chunk_tokens=4_096
    )
    return Engine(decoder, config, items=items, bundle_version="curves")


@dataclass(frozen=True, slots=True)
class Elapsed:
    """The time of one ranking: wall milliseconds and CPU milliseconds, which other load hardly affects."""

    ms: float
    cpu_ms: float


@dataclass(slots=True)
class RankingRunner:
    """Ranks on one engine over one catalogue, after histories of random items."""

    engine: Engine
    items: ItemCodes
    rng: np.random.Generator
    num_asked: int = 0

    def history(self, num_items: int) -> np.ndarray:
        """Draw item indices."""
        return self.rng.integers(0, len(self.items.codes), num_items)

    def rank(self, history: np.ndarray, *, k: int = 10, width: int = 32) -> Elapsed:
        """Rank items outside the history, one request alone, and return the time from request to result."""
        prompt = [0, *(self.items.codes[history] + np.array(self.items.token_offsets)).ravel().tolist()]
        self.num_asked += 1
        began, began_cpu = time.perf_counter(), time.process_time()
        self.engine.add_rank(str(self.num_asked), prompt, k=k, beam_width=width, excluded=history)
        [outcome] = [ended for _ in range(1 + self.items.codes.shape[1]) for ended in self._step()]
        taken = Elapsed(1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - began_cpu))
        assert len(outcome.item_indices) == k, "a ranking came up short"
        return taken

    def _step(self) -> list[EngineOutcome]:
        return self.engine.step(0.0) if self.engine.has_work else []
