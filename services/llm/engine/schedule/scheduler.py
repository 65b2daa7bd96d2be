"""Plans the next step: continuous batching of prefill chunks, text decode and beam steps under two budgets.

Pure: no torch, no clock, no randomness; time is an argument. A step takes beam steps and decode tokens first, because
those requests hold memory and are nearest to their end. Half of the remaining tokens go to the shortest prompts of the best
priority, so that many long prompts do not delay them; the rest go by urgency (priority, lowered by waiting), so that nothing
waits for ever. The shortest prompts do not take the last running slot, and are not admitted while the most urgent waiting
request finds no free blocks.
"""

from collections import Counter
from dataclasses import dataclass

from models.decoder.window import Window
from services.llm.engine.config import EngineConfig
from services.llm.engine.kv.block_pool import BlockPool
from services.llm.engine.kv.block_table import BlockNeed, BlockTables
from services.llm.engine.schedule.plan import Chunk, StepPlan
from services.llm.engine.schedule.queue import LiveSequences
from services.llm.engine.schedule.sequence import Sequence


class Scheduler:
    """Owns every live sequence and its blocks. Calls in order: `add`, `schedule`, `advance`, `finish`; from one thread.

    `window` is the sliding window of all layers, if they have one: blocks behind it are freed while a sequence runs. `pool` is shared
    with the schedulers of other versions, one of which runs at a time; None for a pool of its own.
    """

    def __init__(
        self, config: EngineConfig, bundle_version: str, window: Window | None = None, pool: BlockPool | None = None
    ) -> None:
        need = BlockNeed(config, window)
        self._config = config
        self._tables = BlockTables(config, need, bundle_version, pool or BlockPool(config.num_blocks))
        self._live = LiveSequences(config, need, self._tables)

    @property
    def pool(self) -> BlockPool:
        """The blocks."""
        return self._tables.pool

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._live.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._live.running)

    def add(self, sequence: Sequence) -> None:
        """Add a request to the queue. Raises Overloaded when its priority's share of the queue is full, InvalidRequest if it could never run."""
        self._live.add(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """Return the live sequence of this request, if any."""
        return self._live.find(request_id)

    def schedule(self, now_s: float) -> StepPlan:
        """Plan the next step. Sequences past their deadline end here and free their blocks."""
        plan = StepPlan(late=self._live.late(now_s))
        for sequence in plan.late:
            self.finish(sequence)
        budget = _Budget(self._config.max_num_batched_tokens, self._config.max_beam_rows)
        for sequence in self._live.by_urgency(self._live.running.values(), now_s):
            if sequence.request_id in self._live.running:
                self._plan_decode_or_beams(plan, budget, sequence, now_s)
        self._plan_prompts(plan, budget, now_s)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """Record that the step was started: tokens computed, full blocks cached, levels done; fully scheduled sequences free their blocks.

        This is correct before the device is done, because steps run one after another: a step that reads or reuses a block
        runs later.
        """
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens = chunk.end
            self._tables.record(sequence, chunk.start)
            if chunk.is_last and sequence.num_levels:
                sequence.num_levels_done = 1
            elif chunk.is_last:
                sequence.num_pending += 1
        for sequence in plan.beam_steps:
            sequence.num_levels_done += len(sequence.next_beam_rows)
        for sequence in plan.sequences:
            sequence.num_steps += 1
            if sequence.is_fully_scheduled:
                self._live.remove(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence and free its blocks."""
        sequence.has_ended = True
        if self.find(sequence.request_id) is sequence:
            self._live.remove(sequence)

    def finish_all(self) -> None:
        """End every sequence and free its blocks."""
        for sequence in self._live.all():
            self.finish(sequence)

    def check_integrity(self, *others: "Scheduler") -> None:
        """Assert that blocks are held exactly by running sequences, of this scheduler and of others on the pool, as often as referenced."""
        holds = [scheduler._live.check_integrity() for scheduler in (self, *others)]
        assert sum(holds, Counter()) == self.pool.references(), "references differ from what running requests hold"

    def _plan_decode_or_beams(self, plan: StepPlan, budget: "_Budget", sequence: Sequence, now_s: float) -> None:
        """Plan beam steps and decode tokens, and allocate the blocks of a running prompt's next chunk."""
        rows = sequence.num_beam_rows
        if sequence.decoding_s is None and (rows or sequence.is_decoding):
            sequence.decoding_s = now_s
        if rows and rows <= budget.beam_rows:
            plan.beam_steps.append(sequence)
            budget.beam_rows -= rows
        elif (
            sequence.num_to_compute and budget.tokens and self._live.make_room(sequence, now_s) and sequence.is_decoding
        ):
            plan.chunks.append(Chunk(sequence, sequence.num_computed_tokens, 1))
            budget.tokens -= 1

    def _plan_prompts(self, plan: StepPlan, budget: "_Budget", now_s: float) -> None:
        live = self._live
        prefilling = [s for s in live.running.values() if s.num_to_compute and not s.is_decoding]
        waiting = live.by_urgency((s for s in live.waiting.values() if not s.is_held_back), now_s)
        counts: dict[Sequence, int] = {}
        half = budget.tokens // 2
        shortest = sorted(prefilling + waiting, key=lambda s: (s.priority, s.num_to_compute))
        most = self._config.max_running - 1 if not waiting or live.has_room_for(waiting[0]) else 0
        budget.tokens -= half - self._distribute(shortest, half, counts, now_s, most_running=most)
        urgent = live.by_urgency(prefilling + waiting, now_s)
        most = self._config.max_running
        budget.tokens = self._distribute(urgent, budget.tokens, counts, now_s, most_running=most)
        plan.chunks.extend(Chunk(sequence, sequence.num_computed_tokens, count) for sequence, count in counts.items())

    def _distribute(
        self, order: list[Sequence], tokens: int, counts: dict[Sequence, int], now_s: float, *, most_running: int
    ) -> int:
        """Distribute tokens over sequences in this order; return the tokens left. Once one finds no room, no other is admitted."""
        admits = True
        for sequence in order:
            if not tokens:
                break
            if sequence.request_id not in self._live.running:
                admits = admits and self.num_running < most_running and self._live.admit(sequence, now_s)
                if not admits:
                    continue
            planned = counts.get(sequence, 0)
            more = min(min(sequence.num_to_compute, self._config.max_chunk_tokens) - planned, tokens)
            if more:
                counts[sequence] = planned + more
                tokens -= more
        return tokens


@dataclass(slots=True)
class _Budget:
    """The rest of the step's two budgets."""

    tokens: int
    beam_rows: int
