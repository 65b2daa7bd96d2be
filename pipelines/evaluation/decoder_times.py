"""The decoder's processor time for one request on the engine that serves it, by length of the user's history.

One request at a time, with nothing cached of its prompt, in fp32 on one thread. Processor time, because other work on
the same cores changes it little.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from models.catalogue import Catalogue
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from models.search import OWN_SEARCH, Search
from pipelines.evaluation.gain import HISTORIES
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine

_NUM_USERS = 50
"""Users who are timed of each slice, at most."""
_NUM_WARM_UP = 3
_K = 10


def decoder_ms(
    decoder_dir: Path,
    catalogue: Catalogue,
    histories: Sequence[np.ndarray],
    slices: Mapping[str, np.ndarray],
    *,
    prompt: Prompt,
    repeats: bool,
    search: Search = OWN_SEARCH,
) -> dict[str, float]:
    """Return the median milliseconds of one request by slice of history length, over users sampled from the slice.

    Args:
        decoder_dir: Its checkpoint.
        catalogue: The items.
        histories: The histories of the test cases.
        slices: By name, a mask over the test cases.
        prompt: The decoder's prompt.
        repeats: Whether seen items are ranked too.
        search: The bundle's search.
    """
    items, decoder = ItemCodes.of(catalogue, search), load_decoder(decoder_dir, torch.float32, "cpu")
    engine = Engine(decoder, EngineConfig(), items=items, bundle_version="timed")

    def rank_ms(history: np.ndarray) -> float:
        tokens, excluded = prompt.tokens(catalogue, history.tolist()), () if repeats else history
        began_s = time.process_time()
        engine.add_rank("timed", tokens, k=_K, excluded=excluded, beam_width=search.beam_width)
        while engine.has_work:
            engine.step(time.monotonic())
        return (time.process_time() - began_s) * 1e3

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engine.warm_up()
        for first in range(_NUM_WARM_UP):
            rank_ms((first + np.arange(prompt.max_items)) % len(catalogue.item_ids))
        draw = np.random.default_rng(0)
        drawn = {name: draw.permutation(np.flatnonzero(slices[name])) for name in HISTORIES if name in slices}
        return {name: median(rank_ms(histories[case]) for case in cases[:_NUM_USERS]) for name, cases in drawn.items()}
    finally:
        torch.set_num_threads(num_threads)
        engine.close()
