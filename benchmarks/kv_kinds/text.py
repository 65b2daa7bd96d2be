"""Perplexity and beams of a language model through the engine's paged KV cache of one data type."""

from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer
from torch.nn import functional

from models.decoder.decoder import Decoder
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig, KvKind
from services.llm.engine.engine import Engine
from services.llm.engine.forward.layers import LayerLoop, StepInputs
from services.llm.engine.forward.ops import TorchOps
from services.llm.engine.forward.torch_attention import TorchAttention
from services.llm.engine.forward.weights import join_weights
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.schedule.plan import Chunk, StepPlan
from services.llm.engine.schedule.sequence import Sequence

_WINDOW_TOKENS = 512
_MAX_WINDOWS = 6
_BLOCK_TOKENS = 16
_LEVEL_SIZE, _NUM_LEVELS, _NUM_ITEMS, _BEAMS = 1_024, 3, 20_000, 32
_PROMPTS_PER_WINDOW = 4
_CPU = torch.device("cpu")


def read_windows(tokenizer: Path, folder: Path) -> list[list[int]]:
    """Cut the Markdown files below a folder into windows of 512 tokens, spread evenly over all of them."""
    text = "\n\n".join(path.read_text() for path in sorted(folder.rglob("*.md")))
    tokens = Tokenizer.from_file(str(tokenizer)).encode(text).ids
    windows = [tokens[at : at + _WINDOW_TOKENS] for at in range(0, len(tokens) - _WINDOW_TOKENS + 1, _WINDOW_TOKENS)]
    return windows[:: -(-len(windows) // _MAX_WINDOWS)]


@torch.inference_mode()
def perplexity(decoder: Decoder, kind: KvKind, windows: list[list[int]]) -> float:
    """Return exp of the mean negative log-likelihood of each window's tokens after its first."""
    weights = join_weights(decoder)
    cache = KvCache(decoder.config, _WINDOW_TOKENS // _BLOCK_TOKENS, _BLOCK_TOKENS, torch.float32, _CPU, kind)
    attention = TorchAttention(_WINDOW_TOKENS, _WINDOW_TOKENS, _BLOCK_TOKENS, _CPU, decoder.config.window)
    forward = LayerLoop(weights, cache, TorchOps(), attention)
    losses = []
    for window in track(windows, f"perplexity, {kind}".ljust(20), console=Console(stderr=True)):
        tokens_T, positions_T = torch.tensor(window), torch.arange(len(window))
        pages = forward.prepare(StepPlan(chunks=[Chunk(_in_order(window), 0, len(window))]))
        hidden_TD = forward.hidden(StepInputs(tokens_T, positions_T, positions_T, pages, None))
        logits_TV = forward.logits(hidden_TD, 0, decoder.config.vocab_size)
        losses.append(functional.cross_entropy(logits_TV[:-1], tokens_T[1:]))
    return float(torch.stack(losses).mean().exp())


def overlap_in_beams(decoder: Decoder, kind: KvKind, windows: list[list[int]]) -> list[np.ndarray]:
    """Return the top ten items after pieces of each window, by beam search over random codes of the vocabulary's first tokens."""
    rng = np.random.default_rng(0)
    items = ItemCodes(
        codes=rng.integers(0, _LEVEL_SIZE, (_NUM_ITEMS, _NUM_LEVELS), dtype=np.int32),
        level_sizes=(_LEVEL_SIZE,) * _NUM_LEVELS,
        token_offsets=tuple(_LEVEL_SIZE * (1 + level) for level in range(_NUM_LEVELS)),
    )
    config = EngineConfig(kv_kind=kind, cpu_kernels="torch", num_blocks=256)
    engine = Engine(decoder, config, items=items, bundle_version=kind)
    piece = _WINDOW_TOKENS // _PROMPTS_PER_WINDOW
    pieces = [window[at : at + piece] for window in windows for at in range(0, len(window), piece)]
    tops = []
    for number, prompt in enumerate(track(pieces, f"beams, {kind}".ljust(20), console=Console(stderr=True))):
        engine.add_rank(str(number), prompt, k=10, beam_width=_BEAMS)
        while engine.has_work:
            tops += [outcome.item_indices for outcome in engine.step(0.0)]
    return tops


def _in_order(window: list[int]) -> Sequence:
    """A sequence whose blocks are 0, 1, 2, ..., so that a token's slot is its position."""
    sequence = Sequence(request_id="w", order=0, tokens=window, priority=0, arrival_s=0.0, deadline_s=None)
    sequence.block_table = list(range(-(-len(window) // _BLOCK_TOKENS)))
    return sequence
