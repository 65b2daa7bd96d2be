"""The engine: requests go in, `step` is called until their outcomes come out. One thread, no clock, no I/O.

It ties the scheduler (who runs) to the runner (what is computed) and knows nothing of users, items' names, bundles on
disk or Ray. One engine serves one version of the weights: its prefix cache is never shared across versions.

An asynchronous engine is one step ahead: `step` plans the next one while the device is busy, collects what that brought, starts
the planned one, and gives the outcomes collected. So the caller tells them while the device runs. A text that will go on unless
its next token is a stop is planned for; if it was one, it is taken out of the plan before that starts. No token is ever
computed behind a stop, and none is told that a synchronous engine would not have told.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

from models.decoder.decoder import Decoder
from services.contracts.rank import EngineLoad
from services.errors import CheckpointError
from services.llm.engine.admission import EngineRequest, RequestBuilder
from services.llm.engine.beam.trie import ItemCodes, Trie
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.cost_model import CostModel
from services.llm.engine.cost.model_size import number_sizes
from services.llm.engine.cost.step_cost import StepCost
from services.llm.engine.forward.runner import Runner, RunningStep
from services.llm.engine.gpu.graph_device import GraphDevice
from services.llm.engine.gpu.graphs import CaptureProgress, GraphCounts
from services.llm.engine.kv.block_need import BlockNeed
from services.llm.engine.outcome import Grown, Outcome, Status
from services.llm.engine.schedule.plan import StepPlan, StepSize
from services.llm.engine.schedule.scheduler import Scheduler
from services.llm.engine.schedule.sequence import Sequence
from services.llm.engine.schedule.work import TextWork, TokenMask
from services.llm.engine.text.parameters import GREEDY, Chosen, Sampling

_NOTHING = StepSize(num_tokens=0, num_requests=0, num_beam_rows=0)


@dataclass(frozen=True, slots=True)
class _Started:
    """A step on the device, its size and its cost."""

    running: RunningStep
    size: StepSize
    cost: StepCost


class Engine:
    """Ranks items of one catalogue and writes text with one decoder. `items` None makes an engine for text alone."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        items: ItemCodes | None,
        bundle_version: str,
        graph_device: GraphDevice | None = None,
    ) -> None:
        """`graph_device` None: CUDA's own where the decoder is on one, none elsewhere."""
        window = decoder.config.window
        if items is not None and window is not None and window.size < len(items.level_sizes):
            raise CheckpointError(f"a sliding window of {window.size} does not hold a code of {len(items.level_sizes)}")
        device = decoder.head_weight_VD.device
        trie = Trie(items, device) if items is not None else None
        need = BlockNeed(config, decoder.config.window_of_all)
        self.max_tokens = need.longest(decoder.config.max_position_embeddings)
        """The longest prompt with its text that memory and positions allow."""
        self._intake = RequestBuilder(config, decoder.config, trie, self.max_tokens)
        self._scheduler = Scheduler(config, bundle_version, decoder.config.window_of_all)
        self._runner = Runner(decoder, config, trie, graph_device)
        sizes = number_sizes(decoder.config, decoder.head_weight_VD.element_size(), config.kv_kind, config.weight_kind)
        self._costs = CostModel(decoder.config, sizes, items.level_sizes if items is not None else ())
        self._is_asynchronous = device.type == "cuda" if config.is_asynchronous is None else config.is_asynchronous
        self._started: _Started | None = None
        self._ended: list[Outcome] = []
        self.last_step = _NOTHING
        self.last_cost: StepCost | None = None
        """What the last collected step moved and computed at least; None if there was none."""
        self.grown: list[Grown] = []
        """The tokens that the last collected step brought, for whoever wants them before the end."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._ended or self._started or self._scheduler.num_running or self._scheduler.num_waiting)

    @property
    def is_ahead(self) -> bool:
        """Whether a step is running that no call of `step` has told of."""
        return self._started is not None

    @property
    def graph_counts(self) -> GraphCounts:
        """Shapes recorded in service, and decode or beam steps run without a recording: both stay 0 after `warm_up`."""
        return self._runner.graph_counts

    def warm_up(self, progress: CaptureProgress = lambda done, total: None) -> None:
        """Record every shape of decode and beam steps, where there are graphs. Takes minutes for a large model."""
        self._runner.warm_up(progress)

    def add_rank(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        *,
        k: int,
        allowed: np.ndarray | None = None,
        excluded: Tokens[int] | np.ndarray = (),
        beam_width: int | None = None,
        priority: int = 0,
        now_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> None:
        """Ask for the k best items after this prompt, among `allowed` (num_items,) bool, None for all, without those `excluded`.

        What repeats between requests (filters) belongs in `allowed`, what does not (items seen) in `excluded`: the work for a
        mask is done once and costs in proportion to the catalogue, an item left out costs for itself alone.

        `beam_width` matters for codes of depth 2 and more; None means k, at least the configured default and at most
        what a step runs. Lower `priority` goes first. The outcome comes from a later `step`, also when nothing is
        allowed. Raises InvalidRequest for what could never run and Overloaded when the queue is full.
        """
        arrival = EngineRequest(request_id, prompt_token_ids, priority, now_s, deadline_s)
        sequence, num_survivors = self._intake.rank(arrival, k, allowed, excluded, beam_width)
        self._scheduler.add(sequence)
        if not num_survivors:
            self._end(sequence, Status.DONE)

    def add_text(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop_token_ids: Iterable[int] = (),
        mask: TokenMask | None = None,
        after: str | None = None,
        priority: int = 0,
        now_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> None:
        """Ask for up to `max_new_tokens` tokens after this prompt; a stop token is the last one given.

        `after` names a request in flight with the same prompt: this one waits until that one's prompt is computed, and
        takes it from the cache.

        Raises InvalidRequest for what could never run and Overloaded when the queue is full.
        """
        arrival = EngineRequest(request_id, prompt_token_ids, priority, now_s, deadline_s)
        sequence = self._intake.text(arrival, max_new_tokens, sampling, stop_token_ids, mask)
        sequence.leader = self._scheduler.find(after) if after is not None else None
        self._scheduler.add(sequence)

    def cancel(self, request_id: str, status: Status = Status.CANCELLED) -> bool:
        """End a request now, its blocks free at once; its outcome comes from the next step. False if it is not in flight.

        `status` is DONE where the caller has all that it wanted: a text that reached a stop string.
        """
        sequence = self._scheduler.find(request_id)
        if sequence is None:
            return False
        self._end(sequence, status)
        return True

    def step(self, now_s: float) -> list[Outcome]:
        """Run one step and give the outcomes of all requests that ended since the last one.

        An asynchronous engine gives those of the step before and has the new one running when it returns.
        """
        self.last_step, self.last_cost, self.grown = _NOTHING, None, []
        plan = self._scheduler.schedule(now_s)
        for sequence in plan.late:
            self._end(sequence, Status.LATE)
        self._collect()
        self._start(plan.without_ended())
        if not self._is_asynchronous:
            self._collect()
        ended, self._ended = self._ended, []
        return ended

    def load(self) -> EngineLoad:
        """Tell how busy the engine is."""
        scheduler = self._scheduler
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.pool.num_held / scheduler.pool.num_blocks,
        )

    def check_integrity(self) -> None:
        """Prove that no block is lost or shared by mistake. For tests."""
        self._scheduler.check_integrity()

    def _start(self, plan: StepPlan) -> None:
        if plan.is_empty:
            return
        running = self._runner.submit(plan)
        size = StepSize(plan.num_tokens, plan.num_requests, plan.num_beam_rows)
        self._started = _Started(running, size, self._costs.of(plan))
        self._scheduler.advance(plan)

    def _collect(self) -> None:
        """Wait for the step that runs, if one does. What was cancelled or late meanwhile gets nothing of it."""
        if self._started is None:
            return
        started, self._started = self._started, None
        self.last_step, self.last_cost = started.size, started.cost
        result = started.running.collect()
        for sequence, items, scores in result.rankings:
            if not sequence.has_ended:
                self._end(sequence, Status.DONE, items, scores)
        for sequence, chosen in result.tokens:
            if not sequence.has_ended:
                self._grow(sequence, chosen)

    def _grow(self, sequence: Sequence, chosen: Chosen) -> None:
        assert isinstance(sequence.work, TextWork), "only text grows"
        sequence.take(chosen)
        self.grown.append(Grown(sequence.request_id, chosen, sequence.num_cached, sequence.arrival_s))
        if sequence.work.mask is not None:
            sequence.work.mask.take(chosen.token_id)
        if chosen.token_id in sequence.work.stop_token_ids:
            self._end(sequence, Status.DONE)
        elif sequence.is_spent:
            self._end(sequence, Status.LENGTH)

    def _end(self, sequence: Sequence, status: Status, *ranking: np.ndarray) -> None:
        """Free what a sequence holds and note its outcome; `ranking`: the items and scores of a ranking that is done."""
        self._scheduler.finish(sequence)
        self._ended.append(Outcome.of(sequence, status, *ranking))
