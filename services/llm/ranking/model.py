"""A loaded bundle: its decoder in an engine, its catalogue, and the conversion of a history to a prompt.

It converts between item ids (outside) and item indices, tokens and masks (inside), and warms the engine up before the
first request. It does not know Ray or the source of bundles.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from models.catalogue import Catalogue
from models.decoder.config import DecoderConfig
from models.prompt import Prompt, prompt_of
from models.registry.bundle import Bundle
from models.search import search_of
from services.contracts.rank import RankRequest, RankResult
from services.contracts.tenant import tenant_of_name
from services.errors import BundleCorrupt, Overloaded
from services.items.live_items import LiveItems
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.kv.memory import KvMemory
from services.llm.engine.outcome import EngineOutcome, SequenceStatus
from services.llm.engine.ranks import load_part, start_ranks
from services.llm.ranking.shown_items import ShownItems
from services.llm.serving.card import KvPoolSize, pool_of
from services.llm.serving.engine_thread import AddRequest, EngineThread
from services.llm.serving.streams import FinishedRequest

_WARM_UP_K = 10
_WARM_UP_BATCH_S = 30.0
_BLOCKED_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True)
class LoadedBundle:
    """A version's catalogue, its engine (owned by the thread that runs it) and its prompt."""

    version: str
    catalogue: Catalogue
    engine: Engine
    prompt: Prompt
    shown: ShownItems
    adapter: str = ""
    """Key of its adapter in the engine; empty if it has none, or if it is merged into the weights."""

    def engine_call(self, request: RankRequest, deadline_s: float) -> AddRequest:
        """Return the function that adds this request to the engine.

        `deadline_s` is on the engine's clock. Items not in the catalogue are ignored.
        """
        history = self.catalogue.indices(request.history_item_ids)
        prompt = self.prompt.tokens(self.catalogue, history)
        allowed, hidden = self.shown.masks(request.filters, time.monotonic())
        excluded = self.catalogue.indices(request.excluded_item_ids) + hidden

        def add(engine: Engine, request_id: str, now_s: float) -> None:
            engine.add_rank(
                request_id,
                prompt,
                k=request.k,
                allowed=allowed,
                excluded=excluded,
                adapter=self.adapter,
                tenant=tenant_of_name(request.name),
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
    *,
    with_adapter: bool = True,
) -> LoadedBundle:
    """Load a bundle and warm its engine up, in the KV memory of a serving engine if it fits.

    Its adapter, if any and not excluded, is merged into the weights. Without `live_items` all its items are shown.
    Raises CheckpointError or BundleCorrupt, ConfigError if the KV pool does not fit.
    """
    catalogue = bundle.catalogue()
    decoder, config = load_part(bundle.decoder_dir, dtype, device, config, with_adapter=with_adapter)
    memory = next(
        (memory for memory in memories if memory.fits(decoder, replace(config, num_blocks=memory.pool.num_blocks))),
        None,
    )
    config = pool_of(decoder, config, pool, memory)
    prompt, search = _prompt_of(bundle), search_of(bundle.manifest)
    items = ItemCodes.of(catalogue, search)
    _check_fit(bundle, catalogue, items, prompt, decoder.config)
    if search.beam_width is not None:
        width = min(search.beam_width, config.max_beam_rows)
        config = replace(config, default_beam_width=width)
    ranks = start_ranks(bundle.decoder_dir, dtype, device, config, items)
    prefixes = bundle.prefix_version if with_adapter else bundle.base_prefix_version
    engine = Engine(decoder, config, items=items, bundle_version=prefixes, memory=memory, ranks=ranks)
    shown = ShownItems((live_items or LiveItems()).lay(catalogue))
    loaded = LoadedBundle(bundle.version, catalogue, engine, prompt, shown)
    try:
        _warm_up(loaded)
    except BaseException:
        engine.close()
        raise
    return loaded


def load_beside(bundle: Bundle, engine: Engine, live_items: LiveItems) -> LoadedBundle:
    """Load a bundle for a running engine of the same decoder, codes and search. Raises BundleCorrupt."""
    catalogue, prompt = bundle.catalogue(), _prompt_of(bundle)
    items = ItemCodes.of(catalogue, search_of(bundle.manifest))
    _check_fit(bundle, catalogue, items, prompt, engine.decoder_config)
    return LoadedBundle(bundle.version, catalogue, engine, prompt, ShownItems(live_items.lay(catalogue)))


def try_out(loaded: LoadedBundle, thread: EngineThread) -> None:
    """Rank once among a running engine's requests. Raises BundleCorrupt if scores are not finite.

    Skipped if the engine is overloaded. Not for a thread that runs an event loop.
    """
    prompt = loaded.prompt.tokens(loaded.catalogue, _longest_history(loaded))

    def add(engine: Engine, request_id: str, now_s: float) -> None:
        late_s = now_s + _WARM_UP_BATCH_S
        engine.add_rank(request_id, prompt, k=_WARM_UP_K, adapter=loaded.adapter, now_s=now_s, deadline_s=late_s)

    with suppress(Overloaded):
        _check_scores(loaded, [asyncio.run(thread.run_request(add)).outcome])


def _longest_history(loaded: LoadedBundle) -> list[int]:
    history: list[int] = (np.arange(loaded.prompt.max_items) % len(loaded.catalogue.item_ids)).tolist()
    return history


def _prompt_of(bundle: Bundle) -> Prompt:
    try:
        return prompt_of(bundle.manifest, bundle.decoder_dir)
    except Exception as error:  # the tokenizer library raises bare Exception for any unreadable file
        raise BundleCorrupt(f"{bundle.path}: the prompt needs decoder/tokenizer.json ({error})") from error


def _check_fit(bundle: Bundle, catalogue: Catalogue, items: ItemCodes, prompt: Prompt, config: DecoderConfig) -> None:
    tokens = zip(items.token_offsets, items.level_sizes, strict=True)
    needed = max(*prompt.head, *prompt.between, *prompt.tail, *(first + size - 1 for first, size in tokens), 0) + 1
    if config.vocab_size < needed:
        raise BundleCorrupt(f"{bundle.path}: the decoder has {config.vocab_size} tokens, the catalogue {needed}")
    longest = prompt.num_tokens(prompt.max_items, catalogue.depth) + len(items.level_sizes) - 1
    if longest > config.max_position_embeddings:
        raise BundleCorrupt(
            f"{bundle.path}: prompts of {longest} tokens, the decoder has {config.max_position_embeddings} positions"
        )


def _warm_up(loaded: LoadedBundle) -> None:
    """Capture graphs, then run every kind of step: long and short prompts, cold and cached, single and batched.

    A batch that finds no free blocks next to the serving engine is skipped.
    """
    loaded.engine.warm_up()
    longest = _longest_history(loaded)
    for batch in ([longest], [longest], [longest[:3]], [longest, longest[:3], longest[1:]]):
        give_up_s = time.monotonic() + _WARM_UP_BATCH_S
        for index, history in enumerate(batch):
            prompt = loaded.prompt.tokens(loaded.catalogue, history)
            with suppress(Overloaded):  # the queue may be shorter
                loaded.engine.add_rank(f"warm-up {index}", prompt, k=_WARM_UP_K, deadline_s=give_up_s)
        while loaded.engine.has_work:
            began_s = time.monotonic()
            _check_scores(loaded, loaded.engine.step(began_s))
            loaded.engine.record_step_time(time.monotonic() - began_s)
            if loaded.engine.is_blocked:
                time.sleep(_BLOCKED_PAUSE_S)


def _check_scores(loaded: LoadedBundle, outcomes: Sequence[EngineOutcome]) -> None:
    """Reject a decoder whose scores are NaN. Raises BundleCorrupt."""
    for outcome in outcomes:
        has_no_items = outcome.status is SequenceStatus.DONE and not len(outcome.scores)
        if has_no_items or outcome.status is SequenceStatus.FAILED:
            raise BundleCorrupt(f"{loaded.version}: the decoder computes scores that are not finite")
