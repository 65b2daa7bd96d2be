"""A loaded bundle: its decoder in an engine, its catalogue, and the conversion of a history to a prompt.

It converts between item ids (outside) and item indices, tokens and masks (inside), and warms the engine up before the
first request. It does not know Ray or the source of bundles.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from models.bundle import Bundle
from models.catalogue import Catalogue
from models.decoder.weights import load_decoder
from models.prompt import prompt_limits, prompt_tokens
from services.contracts.rank import RankRequest, RankResult
from services.errors import BundleCorrupt, Overloaded
from services.items.live_items import LiveItems
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.kv.memory import KvMemory
from services.llm.engine.outcome import EngineOutcome, Status
from services.llm.ranking.shown_items import ShownItems
from services.llm.serving.card import KvPoolSize, pool_of
from services.llm.serving.engine_thread import AddRequest
from services.llm.serving.streams import FinishedRequest

_WARM_UP_K = 10
_WARM_UP_BATCH_S = 30.0
_BLOCKED_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True)
class LoadedBundle:
    """A version's catalogue, its engine (owned by the thread that runs it) and its prompt window in items."""

    version: str
    catalogue: Catalogue
    engine: Engine
    max_items: int
    stride: int
    shown: ShownItems

    def engine_call(self, request: RankRequest, deadline_s: float) -> AddRequest:
        """Return the function that adds this request to the engine.

        `deadline_s` is on the engine's clock. Items not in the catalogue are ignored.
        """
        history = self.catalogue.indices(request.history_item_ids)
        prompt = prompt_tokens(self.catalogue, history, self.max_items, self.stride)
        allowed, hidden = self.shown.masks(request.filters, time.monotonic())
        excluded = self.catalogue.indices(request.excluded_item_ids) + hidden

        def add(engine: Engine, request_id: str, now_s: float) -> None:
            engine.add_rank(
                request_id,
                prompt,
                k=request.k,
                allowed=allowed,
                excluded=excluded,
                priority=request.priority,
                now_s=now_s,
                deadline_s=deadline_s,
            )

        return add

    def result_of(self, ended: FinishedRequest) -> RankResult:
        """Return a finished ranking with item ids."""
        outcome = ended.outcome
        return RankResult(
            item_ids=tuple(self.catalogue.item_ids[index] for index in outcome.item_indices.tolist()),
            scores=tuple(outcome.scores.tolist()),
            bundle_version=self.version,
            num_prompt_tokens=outcome.num_prompt_tokens,
            num_cached_tokens=outcome.num_cached_tokens,
            queue_ms=(ended.started_s - outcome.arrival_s) * 1e3,
            compute_ms=(ended.finished_s - ended.started_s) * 1e3,
            load=ended.load,
            decode_ms=(ended.finished_s - ended.decoding_s) * 1e3,
            num_steps=outcome.num_steps,
        )


def load_bundle(
    bundle: Bundle,
    config: EngineConfig,
    dtype: torch.dtype,
    device: str,
    pool: KvPoolSize | None = None,
    memories: Sequence[KvMemory] = (),
    live_items: LiveItems | None = None,
) -> LoadedBundle:
    """Load a bundle and warm its engine up, in the KV memory of a serving engine if it fits.

    Without `live_items` all its items are shown. Raises CheckpointError or BundleCorrupt, ConfigError if the KV pool
    does not fit.
    """
    catalogue = bundle.catalogue()
    decoder = load_decoder(bundle.decoder_dir, dtype, device)
    memory = next((one for one in memories if one.fits(decoder, replace(config, num_blocks=one.pool.num_blocks))), None)
    config = pool_of(decoder, config, pool, memory)
    max_items, stride = prompt_limits(bundle.manifest)
    _check_fit(bundle, catalogue, max_items, decoder.config.vocab_size, decoder.config.max_position_embeddings)
    items = ItemCodes(codes=catalogue.codes, level_sizes=catalogue.level_sizes, token_offsets=catalogue.token_offsets)
    engine = Engine(decoder, config, items=items, bundle_version=bundle.prefix_version, memory=memory)
    shown = ShownItems((live_items or LiveItems()).lay(catalogue))
    loaded = LoadedBundle(bundle.version, catalogue, engine, max_items, stride, shown)
    try:
        _warm_up(loaded)
    except BaseException:
        engine.close()
        raise
    return loaded


def _check_fit(bundle: Bundle, catalogue: Catalogue, max_items: int, vocab_size: int, max_positions: int) -> None:
    if vocab_size < catalogue.vocab_size:
        raise BundleCorrupt(f"{bundle.path}: the decoder has {vocab_size} tokens, the catalogue {catalogue.vocab_size}")
    longest = 1 + (max_items + 1) * catalogue.depth - 1
    if longest > max_positions:
        raise BundleCorrupt(f"{bundle.path}: prompts of {longest} tokens, the decoder has {max_positions} positions")


def _warm_up(loaded: LoadedBundle) -> None:
    """Capture graphs, then run every kind of step: long and short prompts, cold and cached, single and batched.

    A batch that finds no free blocks next to the serving engine is skipped.
    """
    loaded.engine.warm_up()
    num_items = len(loaded.catalogue.item_ids)
    longest = (np.arange(loaded.max_items) % num_items).tolist()
    for batch in ([longest], [longest], [longest[:3]], [longest, longest[:3], longest[1:]]):
        give_up_s = time.monotonic() + _WARM_UP_BATCH_S
        for place, history in enumerate(batch):
            prompt = prompt_tokens(loaded.catalogue, history, loaded.max_items, loaded.stride)
            with suppress(Overloaded):  # the queue may be shorter
                loaded.engine.add_rank(f"warm-up {place}", prompt, k=_WARM_UP_K, deadline_s=give_up_s)
        while loaded.engine.has_work:
            began_s = time.monotonic()
            _check_scores(loaded, loaded.engine.step(began_s))
            loaded.engine.record_step_time(time.monotonic() - began_s)
            if loaded.engine.is_blocked:
                time.sleep(_BLOCKED_PAUSE_S)


def _check_scores(loaded: LoadedBundle, outcomes: Sequence[EngineOutcome]) -> None:
    """Reject a decoder whose scores are NaN. Raises BundleCorrupt."""
    for outcome in outcomes:
        is_ranked = outcome.status is not Status.DONE or (len(outcome.scores) and np.isfinite(outcome.scores).all())
        if not is_ranked:
            raise BundleCorrupt(f"{loaded.version}: the decoder computes scores that are not finite")
