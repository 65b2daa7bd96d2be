"""The engine: requests are added, and `step` is called until it has returned their outcomes.

One thread, no clock, no I/O. It connects the scheduler (which requests run) to the runner (how they are computed). It
does not know users, item ids, bundles on disk or Ray. An engine serves one version of the weights: its prefix cache is
never shared between versions.

An asynchronous engine runs one step ahead: `step` plans the next step while the device is busy, collects the results of
the running step, starts the planned step and returns the collected outcomes, so that the caller handles them while the
device runs. A text is planned before its latest token is known; if that token is a stop token, the text is removed from
the plan before the step starts. With recorded steps, a plan whose texts need nothing from the host (no mask, no
penalties) starts before the running step is collected: tokens are fed on the device, and anything computed after a stop
token is dropped. The results equal a synchronous engine's results.
"""

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

from models.decoder.adapter import Adapter
from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from services.contracts.engine_load import EngineLoad
from services.errors import CheckpointError, TailraceError
from services.llm.engine.adapters import AdapterPool
from services.llm.engine.admission import EngineRequest, RequestBuilder
from services.llm.engine.beam.trie import ItemCodes, Trie
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.cost_model import CostModel, StepCost, StepKind, number_sizes
from services.llm.engine.cost.step_time import StepTime
from services.llm.engine.cpu.forward import compute_dtype
from services.llm.engine.device import DeviceStream
from services.llm.engine.gpu.graph_device import GraphDevice
from services.llm.engine.gpu.graphs import CaptureProgress, GraphCounts
from services.llm.engine.kv.block_table import BlockNeed
from services.llm.engine.kv.memory import KvMemory
from services.llm.engine.outcome import EngineOutcome, NewToken, SequenceStatus
from services.llm.engine.plan import StepPlan, StepSize
from services.llm.engine.ranks import LeadRank
from services.llm.engine.runner import Runner, RunningStep
from services.llm.engine.sampling_parameters import GREEDY, SampledToken, SamplingParams, TokenMask
from services.llm.engine.scheduler import Scheduler
from services.llm.engine.sequence import Sequence, TextWork
from services.llm.engine.text.drafts import DraftCounts, Drafter

_NOTHING = StepSize(num_batched_tokens=0, num_requests=0, num_beam_rows=0)


@dataclass(frozen=True, slots=True)
class _Started:
    """A step running on the device, with its size and cost."""

    running: RunningStep
    size: StepSize
    cost: StepCost
    has_drafts: bool


@dataclass(frozen=True, slots=True)
class KvSize:
    """The size of an engine's KV pool."""

    block_tokens: int
    num_blocks: int


class Engine:
    """Ranks items of one catalogue and generates text with one decoder. `items` is None for a text-only engine."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        items: ItemCodes | None,
        bundle_version: str,
        graph_device: GraphDevice | None = None,
        memory: KvMemory | None = None,
        ranks: LeadRank | None = None,
    ) -> None:
        """Create an engine that can serve immediately; `warm_up` makes its first requests fast.

        Args:
            decoder: Its weights; the engine joins them in place.
            config: Sizes and limits.
            items: The catalogue; None for a text-only engine.
            bundle_version: Key of the cached prefixes.
            graph_device: None: CUDA graphs if the decoder is on a CUDA device, otherwise no graphs.
            memory: KV memory of the preceding engine: used if it fits, instead of new memory.
            ranks: The other ranks, if the decoder is a shard.
        """
        window = decoder.config.window
        if items is not None and window is not None and window.size < len(items.level_sizes):
            raise CheckpointError(f"a sliding window of {window.size} does not hold a code of {len(items.level_sizes)}")
        device = decoder.head_weight_VD.device
        if device.type == "cpu":
            decoder.to(compute_dtype(decoder.head_weight_VD.dtype, config))
        self.stream = DeviceStream(device)
        """The stream of all of the engine's work."""
        need = BlockNeed(config, decoder.config.window_of_all)
        self.max_tokens = need.longest(decoder.config.max_position_embeddings)
        """Maximum number of tokens of a prompt and its text together, limited by KV memory and positions."""
        self.kv_size = KvSize(config.block_tokens, config.num_blocks)
        with self.stream.entered():
            self.memory = memory if memory is not None and memory.fits(decoder, config) else KvMemory(decoder, config)
            """The blocks, shared with the preceding and the following engine if they fit."""
            self.memory.join(self.stream)
            trie = Trie(items, device) if items is not None else None
            self._runner = Runner(decoder, config, trie, self.memory.cache, graph_device, ranks)
            self._ranks = ranks
            self._builder = RequestBuilder(
                config, decoder.config, trie, self.max_tokens, records_steps=self._runner.records_steps
            )
        self._scheduler = Scheduler(config, bundle_version, decoder.config.window_of_all, self.memory.pool)
        sizes = number_sizes(decoder.config, decoder.head_weight_VD.element_size(), config.kv_kind, config.weight_kind)
        self._step_time = StepTime(config.target_step_s)
        self.decoder_config = decoder.config
        self._adapters = AdapterPool(
            config, decoder.config, decoder.head_weight_VD.dtype, device, self._runner.use_adapters
        )
        self._now_s = 0.0
        self._drafter = Drafter(config.num_speculative_tokens, config.block_tokens, config.max_num_batched_tokens)
        self._drafts = config.num_speculative_tokens > 0
        self.expected_step_s = 0.0
        """Expected duration of the running call of `step`; 0 before the first measurement. Other threads may read
        it."""
        self._costs = CostModel(decoder.config, sizes, _scored_sizes(decoder.config, items))
        self._is_asynchronous = device.type == "cuda" if config.is_asynchronous is None else config.is_asynchronous
        self._started: _Started | None = None
        self._open: dict[str, Sequence] = {}
        """The requests without an outcome."""
        self._ended: list[EngineOutcome] = []
        self.last_step = _NOTHING
        self.last_cost: StepCost | None = None
        """The roofline cost of the last collected step, or None."""
        self.new_tokens: list[NewToken] = []
        """The text tokens of the last collected step, for streaming."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to run or to return."""
        return bool(self._ended or self._started or self._scheduler.num_running or self._scheduler.num_waiting)

    @property
    def is_blocked(self) -> bool:
        """Whether requests wait and the last `step` started nothing: another engine holds the blocks of the memory."""
        return bool(self._scheduler.num_waiting) and not (self._ended or self._started or self.last_step.num_requests)

    @property
    def is_ahead(self) -> bool:
        """Whether a step is running whose results no call of `step` has returned yet."""
        return self._started is not None

    @property
    def graph_counts(self) -> GraphCounts:
        """Graphs captured after warm-up, and decode or beam steps that ran without a graph; both 0 after `warm_up`."""
        return self._runner.graph_counts

    @property
    def draft_counts(self) -> DraftCounts:
        """Draft tokens verified so far, and how many were right."""
        return self._drafter.counts

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights and their scales, as they stay in memory."""
        return self._runner.weight_bytes

    def warm_up(self, progress: CaptureProgress = lambda done, total: None) -> None:
        """Capture the graphs of all shapes of decode and beam steps, if graphs are used.

        Takes minutes for a large model.
        """
        with self.stream.entered():
            self._runner.warm_up(progress)

    def load_adapter(self, key: str, adapter: Adapter) -> None:
        """Load an adapter for later requests; `key` identifies its content. The first takes the memory of all slots.

        Raises ConfigError naming the setting if an adapter does not fit, or for an engine of several ranks.
        """
        with self.stream.entered():
            self._adapters.add(key, adapter)

    def unload_adapter(self, key: str) -> None:
        """Refuse later requests for an adapter; requests in flight finish with it. The last frees all slots."""
        self._adapters.remove(key)

    def add_rank(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        *,
        k: int,
        allowed: np.ndarray | None = None,
        excluded: Tokens[int] | np.ndarray = (),
        beam_width: int | None = None,
        adapter: str = "",
        tenant: str = "",
        priority: int = 0,
        now_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> None:
        """Add a request for the k best items after a prompt.

        A later `step` returns its outcome, even if no item is allowed.

        Args:
            request_id: Unique among the requests in flight.
            prompt_token_ids: At least one token.
            k: Number of items.
            allowed: (num_items,) bool, None for all. For filters, which repeat between requests: the cost of a mask is
                proportional to the catalogue, and masks are cached.
            excluded: Item indices, in any order. For seen items, which do not repeat: the cost is proportional to their
                number.
            beam_width: Used for codes of depth 2 and more. None means k, at least the configured default and at most
                the beam rows of a step.
            adapter: Key of a loaded adapter; empty for the base.
            tenant: Tenants take turns in the steps, and share no cached prefixes.
            priority: Lower goes first.
            now_s: The caller's clock.
            deadline_s: On the same clock, or None.

        Raises:
            InvalidRequest: The request could never run; names the field.
            Overloaded: The queue is full.
        """
        request = EngineRequest(request_id, prompt_token_ids, priority, now_s, deadline_s)
        with self.stream.entered():
            sequence, num_allowed = self._builder.rank(request, k, allowed, excluded, beam_width)
        sequence.tenant, sequence.cache_scope = tenant, tenant.encode()
        self._add(sequence, adapter)
        if not num_allowed:
            self._end(sequence, SequenceStatus.DONE)

    def add_text(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        stop_token_ids: Iterable[int] = (),
        mask: TokenMask | None = None,
        after: str | None = None,
        adapter: str = "",
        cache_scope: bytes = b"",
        tenant: str = "",
        weight: float = 1.0,
        priority: int = 0,
        now_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> None:
        """Add a request for up to `max_new_tokens` tokens after a prompt; a stop token is the last token returned.

        Args:
            request_id: Unique among the requests in flight.
            prompt_token_ids: At least one token.
            max_new_tokens: At least 1; prompt and new tokens together at most `max_tokens`.
            sampling: Sampling parameters.
            stop_token_ids: Tokens that end the text.
            mask: A grammar that the text must follow, or None.
            after: Id of a request in flight with the same prompt: this request waits until that prompt is computed and
                takes it
                from the prefix cache.
            adapter: Key of a loaded adapter; empty for the base.
            cache_scope: Prefixes are shared only with texts of an equal scope.
            tenant: Tenants take turns in the steps, by weight.
            weight: The tenant's.
            priority: Lower goes first.
            now_s: The caller's clock.
            deadline_s: On the same clock, or None.

        Raises:
            InvalidRequest: The request could never run; names the field.
            Overloaded: The queue is full.
        """
        request = EngineRequest(request_id, prompt_token_ids, priority, now_s, deadline_s)
        sequence = self._builder.text(request, max_new_tokens, sampling, stop_token_ids, mask)
        sequence.cache_scope, sequence.tenant, sequence.weight = cache_scope, tenant, weight
        sequence.leader = self._scheduler.find(after) if after is not None else None
        self._add(sequence, adapter)

    def _add(self, sequence: Sequence, adapter: str) -> None:
        """Add a sequence to the queue with its adapter's slot. The keys and values of an adapter are its own."""
        if not adapter:
            self._scheduler.add(sequence)
            self._open[sequence.request_id] = sequence
            return
        with self.stream.entered():
            sequence.adapter_slot = self._adapters.acquire(adapter, sequence.arrival_s)
        sequence.adapter, sequence.levels_at_once = adapter, 1
        sequence.cache_scope = hashlib.blake2b(adapter.encode(), digest_size=16).digest() + sequence.cache_scope
        try:
            self._scheduler.add(sequence)
        except TailraceError:
            self._adapters.release(adapter, sequence.arrival_s)
            raise
        self._open[sequence.request_id] = sequence

    def cancel(self, request_id: str, status: SequenceStatus = SequenceStatus.CANCELLED) -> bool:
        """End a request now and free its blocks; the next step returns its outcome.

        Returns False if it is not in flight.
        `status` is DONE if the caller needs no more of the request, such as a text that reached a stop string.
        """
        sequence = self._scheduler.find(request_id)
        if sequence is None:
            return False
        self._end(sequence, status)
        return True

    def step(self, now_s: float) -> list[EngineOutcome]:
        """Run one step and return the outcomes of all requests that ended since the last call.

        An asynchronous engine returns the outcomes of the previous step, with the new step running.
        """
        self.last_step, self.last_cost, self.new_tokens = _NOTHING, None, []
        self._now_s = now_s
        with self.memory.lock:
            plan = self._scheduler.schedule(now_s, self._step_time.max_rows())
        running = self._started.size.num_rows if self._started is not None else 0
        self.expected_step_s = self._step_time.predicted_s(running + plan.size.num_rows)
        for sequence in plan.late:
            self._end(sequence, SequenceStatus.LATE)
        with self.stream.entered():
            if self._is_asynchronous:
                self._step_ahead(plan)
            else:
                self._step_synchronously(plan)
        ended, self._ended = self._ended, []
        return ended

    def record_step_time(self, seconds: float) -> None:
        """Record the duration of the last collected step, which determines the sizes of later steps."""
        self._step_time.record(self.last_step.num_rows, seconds)
        if self._drafts and self.last_cost is not None and self.last_cost.kind is StepKind.DECODE:
            self._drafter.record_step_time(self.last_step.num_rows, seconds)

    def load(self) -> EngineLoad:
        """Return the engine's load."""
        scheduler = self._scheduler
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.pool.num_held / scheduler.pool.num_blocks,
        )

    def restart(self) -> set[str]:
        """Drop all requests, without outcomes, after a step that raised, and return their ids. Adapters stay loaded.

        Raises RuntimeError for an engine of several ranks, which may have stopped at different points of the step.
        """
        if self._ranks is not None:
            raise RuntimeError("the ranks of an engine cannot be restarted")
        for sequence in list(self._open.values()):
            self._end(sequence, SequenceStatus.FAILED)
        dropped = {outcome.request_id for outcome in self._ended}
        self._started, self._ended = None, []
        return dropped

    def close(self) -> None:
        """Free all blocks, for other engines on the memory, and end all ranks.

        For a failed engine: its requests have no outcome.
        """
        with self.memory.lock:
            self._scheduler.finish_all()
        if self._ranks is not None:
            self._ranks.stop()

    def check_integrity(self, *others: "Engine") -> None:
        """Assert that no block is lost or shared by mistake, including the other engines on the memory. For tests."""
        with self.memory.lock:
            self._scheduler.check_integrity(*(other._scheduler for other in others))

    def _step_synchronously(self, plan: StepPlan) -> None:
        """Start the planned step and wait for its results."""
        self._collect(self._start(plan))

    def _step_ahead(self, plan: StepPlan) -> None:
        """Collect the running step and leave the planned step running.

        The planned step starts before the collection if it can be fed on the device, otherwise after it.
        """
        before, self._started = self._started, None
        waits = self._drafts and self._drafter.could_draft(plan)
        if before is not None and not (waits or before.has_drafts) and self._runner.can_feed(plan):
            self._started = self._start(plan)
            self._collect(before)
        else:
            self._collect(before)
            self._started = self._start(plan.without_ended())

    def _start(self, plan: StepPlan) -> _Started | None:
        """Start a step; None if there is nothing to run."""
        if plan.is_empty:
            return None
        if self._drafts:
            plan = self._drafter.with_drafts(plan)
        self.memory.order(self.stream)
        try:
            running = self._runner.submit(plan)
        finally:  # also after a failure: its work may still run when `close` frees the blocks
            self.stream.mark()
        started = _Started(running, plan.size, self._costs.of(plan), plan.has_drafts)
        with self.memory.lock:
            self._scheduler.advance(plan)
        return started

    def _collect(self, started: _Started | None) -> None:
        """Wait for a running step, if any. Results of requests that ended meanwhile are dropped."""
        if started is None:
            return
        self.last_step, self.last_cost = started.size, started.cost
        result = started.running.collect()
        for sequence, items, scores in result.rankings:
            if sequence.has_ended:
                continue
            if len(items) and np.isfinite(scores).all():
                self._end(sequence, SequenceStatus.DONE, items, scores)
            else:  # beams drop scores that are NaN; such scores of a row reach no other row
                self._end(sequence, SequenceStatus.FAILED)
        for sequence, sampled in result.tokens.items():
            for index, token in enumerate(self._drafter.verify(sequence, sampled)):
                if sequence.has_ended:
                    break
                if index:
                    with self.memory.lock:
                        self._scheduler.accept_draft(sequence)
                self._append(sequence, token)

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        work = TextWork.of(sequence)
        if work.mask is not None:
            work.mask.take(sampled.token_id)
            if work.mask.failure is not None:  # the token has no meaning
                self._end(sequence, SequenceStatus.FAILED)
                return
        sequence.append_token(sampled)
        self.new_tokens.append(NewToken(sequence.request_id, sampled, sequence.num_cached_tokens, sequence.arrival_s))
        if sampled.token_id in work.stop_token_ids:
            self._end(sequence, SequenceStatus.DONE)
        elif len(sequence.generated) == sequence.max_new_tokens:
            self._end(sequence, SequenceStatus.LENGTH)

    def _end(self, sequence: Sequence, status: SequenceStatus, *ranking: np.ndarray) -> None:
        """Free the blocks of a sequence and add its outcome. `ranking`: items and scores of a completed ranking."""
        with self.memory.lock:
            self._scheduler.finish(sequence)
        self._open.pop(sequence.request_id, None)
        self._drafter.forget(sequence)
        if sequence.adapter:
            with self.stream.entered():
                self._adapters.release(sequence.adapter, self._now_s)
        self._ended.append(EngineOutcome.of(sequence, status, *ranking))


def _scored_sizes(config: DecoderConfig, items: ItemCodes | None) -> tuple[int, ...]:
    """Return the number of head rows that each level reads."""
    if items is None:
        return ()
    return items.level_sizes if items.scores == "catalogue" else (config.vocab_size,) * len(items.level_sizes)
