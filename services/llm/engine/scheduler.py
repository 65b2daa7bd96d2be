"""Plans the next step: continuous batching of prefill chunks, text decode and beam steps under two budgets.

Pure: no torch, no clock, no randomness; time is an argument. A step takes beam steps and decode tokens first, because
their requests hold memory and are closest to completion. Half of the remaining tokens go to the shortest prompts of the
best priority, so that many long prompts do not delay them; the rest is distributed by urgency (priority, lowered by
waiting), so that no request waits forever. Where a step serves several tenants, these orders hold within a tenant, and
the tenant that had the fewest tokens and beam rows for its weight goes first. The shortest prompts do not take the last
running slot, and are not admitted while the most urgent waiting request lacks free blocks.

A sequence is admitted when there are blocks for its whole prompt (with sliding windows: for the part that is visible at
once). So blocks can run out only for text decode, and for a prompt whose blocks were freed as its windows passed. Then
the least urgent running sequence is preempted: it returns to the queue and is recomputed later. The most urgent
sequence is never preempted, so progress is guaranteed.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from models.decoder.window import Window
from services.contracts.access import places_for
from services.contracts.fairness import FairOrder, has_place
from services.errors import InvalidRequest, Overloaded
from services.llm.engine.config import EngineConfig
from services.llm.engine.kv.block_pool import BlockPool
from services.llm.engine.kv.block_table import BlockNeed, BlockTables
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sequence import Sequence

_RETRY_AFTER_S = 0.1
_MIN_PROMPT_TOKENS = 16
"""Minimum number of prompt tokens per step, so that prompts always advance next to decoding texts."""


class Scheduler:
    """Owns every live sequence and its blocks. Calls in order: `add`, `schedule`, `advance`, `finish`; from one thread.

    `window` is the sliding window of all layers, if any: blocks behind it are freed while a sequence runs. `pool` is
    shared with the schedulers of other versions, which run in turn; None for a separate pool.
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
        return self._tables.pool

    @property
    def num_waiting(self) -> int:
        return len(self._live.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._live.running)

    def add(self, sequence: Sequence) -> None:
        """Add a request to the queue.

        Raises Overloaded when its priority's part of the queue is full, InvalidRequest if it could never run.
        """
        self._live.add(sequence)

    def find(self, request_id: str) -> Sequence | None:
        return self._live.find(request_id)

    def schedule(self, now_s: float, max_rows: int | None = None) -> StepPlan:
        """Plan the next step. Sequences past their deadline end here and free their blocks.

        `max_rows` bounds prompt tokens and beam rows below the configured limits. Decode tokens, the beams of one
        request and a few prompt tokens always run.
        """
        plan = StepPlan(late=self._live.late(now_s))
        for sequence in plan.late:
            self.finish(sequence)
        self._live.begin_turn()
        max_rows = max_rows or max(self._config.max_num_batched_tokens, self._config.max_beam_rows)
        budget = _Budget(self._config.max_num_batched_tokens, min(self._config.max_beam_rows, max_rows))
        for sequence in self._live.in_turn(self._live.running.values(), now_s):
            if sequence.request_id in self._live.running:
                self._plan_decode_or_beams(plan, budget, sequence, now_s)
        budget.tokens = min(budget.tokens, max(max_rows - plan.num_batched_tokens, _MIN_PROMPT_TOKENS))
        self._plan_prompts(plan, budget, now_s)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """Record that the step was started: tokens computed, full blocks cached, levels done.

        Fully scheduled sequences free their blocks. This is correct before the device is done, because steps run in
        sequence: a step that reads or reuses a block runs later.
        """
        for chunk in plan.chunks:
            sequence = chunk.sequence
            self._live.charge(sequence, chunk.num_tokens)
            sequence.num_computed_tokens = min(chunk.end, sequence.num_tokens)
            self._tables.record(sequence, chunk.start)
            if chunk.is_last and sequence.num_levels:
                sequence.num_levels_done = 1
            elif chunk.is_last:
                sequence.num_pending += 1
        for sequence in plan.beam_steps:
            self._live.charge(sequence, sum(sequence.next_beam_rows))
            sequence.num_levels_done += len(sequence.next_beam_rows)
        for sequence in plan.sequences:
            sequence.num_steps += 1
            if sequence.is_fully_scheduled:
                self._live.remove(sequence)

    def accept_draft(self, sequence: Sequence) -> None:
        """Record that the last step has also computed the text's newest token, which was drafted."""
        sequence.num_computed_tokens += 1
        self._tables.record(sequence, sequence.num_computed_tokens - 1)

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
        """Assert that exactly the running sequences hold blocks, with equal reference counts.

        Includes the sequences of other schedulers on the pool.
        """
        holds = [scheduler._live.check_integrity() for scheduler in (self, *others)]
        assert sum(holds, Counter()) == self.pool.references(), "references differ from what running requests hold"

    def _plan_decode_or_beams(self, plan: StepPlan, budget: "_Budget", sequence: Sequence, now_s: float) -> None:
        """Plan beam steps and decode tokens, and allocate the blocks of a running prompt's next chunk."""
        rows = sequence.num_beam_rows
        if sequence.decoding_s is None and (rows or sequence.is_decoding):
            sequence.decoding_s = now_s
        if rows and (rows <= budget.beam_rows or not plan.beam_steps):
            plan.beam_steps.append(sequence)
            budget.beam_rows -= rows
        elif (
            sequence.num_to_compute
            and budget.tokens
            and self._live.make_room(sequence, now_s, plan)
            and sequence.is_decoding
        ):
            plan.chunks.append(Chunk(sequence, sequence.num_computed_tokens, 1))
            budget.tokens -= 1

    def _plan_prompts(self, plan: StepPlan, budget: "_Budget", now_s: float) -> None:
        live = self._live
        prefilling = [s for s in live.running.values() if s.num_to_compute and not s.is_decoding]
        waiting = live.in_turn((s for s in live.waiting.values() if not s.is_held_back), now_s)
        counts: dict[Sequence, int] = {}
        half = budget.tokens // 2
        shortest = sorted(prefilling + waiting, key=lambda s: (live.turn(s), s.priority, s.num_to_compute))
        most = self._config.max_running - 1 if not waiting or live.has_room_for(waiting[0]) else 0
        budget.tokens -= half - self._distribute(shortest, half, counts, now_s, most_running=most)
        urgent = live.in_turn(prefilling + waiting, now_s)
        most = self._config.max_running
        budget.tokens = self._distribute(urgent, budget.tokens, counts, now_s, most_running=most)
        plan.chunks.extend(Chunk(sequence, sequence.num_computed_tokens, count) for sequence, count in counts.items())

    def _distribute(
        self, order: list[Sequence], tokens: int, counts: dict[Sequence, int], now_s: float, *, most_running: int
    ) -> int:
        """Distribute tokens over sequences in this order; return the remaining tokens.

        Once a sequence finds no room, no other sequence is admitted.
        """
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
    """The remainder of the step's two budgets."""

    tokens: int
    beam_rows: int


class LiveSequences:
    """Every sequence between `add` and `remove`, by request id.

    A sequence is in `waiting`, where it holds no block, or in `running`.
    """

    def __init__(self, config: EngineConfig, need: BlockNeed, tables: BlockTables) -> None:
        self.waiting: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self._config = config
        self._need = need
        self._tables = tables
        self._order = FairOrder()

    def add(self, sequence: Sequence) -> None:
        """Add a request to the queue.

        Raises Overloaded when its priority's part of the queue is full and its tenant has its share of it,
        InvalidRequest if it could never run.
        """
        num_tokens = len(sequence.tokens) + sequence.max_new_tokens
        assert self._need.longest(num_tokens) == num_tokens, "longer than the pool, which admission refuses"
        self._check_can_run(sequence)
        places = places_for(sequence.priority, self._config.max_waiting)
        if len(self.waiting) >= places and not self._has_place(sequence, places):
            raise Overloaded("the engine's queue", _RETRY_AFTER_S)
        self._tables.hash_blocks(sequence)
        self.waiting[sequence.request_id] = sequence

    def find(self, request_id: str) -> Sequence | None:
        return self.running.get(request_id) or self.waiting.get(request_id)

    def all(self) -> tuple[Sequence, ...]:
        return (*self.waiting.values(), *self.running.values())

    def by_urgency(self, group: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Return the group sorted, most urgent first."""
        ageing_s = self._config.ageing_s
        return sorted(group, key=lambda sequence: sequence.urgency(now_s, ageing_s))

    def in_turn(self, group: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Return the group sorted by the turn of its tenants, the most urgent of a tenant first."""
        ageing_s = self._config.ageing_s
        return sorted(group, key=lambda sequence: (self.turn(sequence), sequence.urgency(now_s, ageing_s)))

    def turn(self, sequence: Sequence) -> float:
        """Return the virtual time at which the sequence's tenant is next; lower first."""
        return self._order.start(sequence.tenant)

    def begin_turn(self) -> None:
        """Move the virtual time to the next tenant's."""
        if self.waiting or self.running:
            self._order.next(sequence.tenant for sequence in self.all())

    def charge(self, sequence: Sequence, num_rows: int) -> None:
        """Count rows of a step for the sequence's tenant."""
        self._order.charge(sequence.tenant, sequence.weight, num_rows)

    def late(self, now_s: float) -> list[Sequence]:
        return [s for s in self.all() if s.deadline_s is not None and s.deadline_s <= now_s]

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether there are enough free blocks, with one reserved for each running text."""
        num_texts = sum(other.max_new_tokens > 0 for other in self.running.values())
        return self._tables.has_room_for(sequence, num_texts)

    def admit(self, sequence: Sequence, now_s: float) -> bool:
        """Move a waiting sequence to running if there are enough blocks."""
        if not self.has_room_for(sequence):
            return False
        self._tables.place(sequence)
        self.running[sequence.request_id] = self.waiting.pop(sequence.request_id)
        if sequence.started_s is None:
            sequence.started_s, sequence.num_cached_tokens = now_s, sequence.num_computed_tokens
        return True

    def make_room(self, sequence: Sequence, now_s: float, plan: StepPlan) -> bool:
        """Allocate the blocks of a running sequence's next tokens, preempting the least urgent sequence if needed.

        Sequences of the plan keep their blocks: a less urgent one is planned first where it is its tenant's turn.
        Returns False if the least urgent is the sequence itself.
        """
        num_missing = self._tables.num_missing(sequence)
        while self._tables.pool.num_free < num_missing:
            planned = set(plan.sequences)
            victim = self.by_urgency((s for s in self.running.values() if s not in planned), now_s)[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._tables.extend(sequence)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence and free its blocks."""
        self.waiting.pop(sequence.request_id, None)
        self.running.pop(sequence.request_id, None)
        self._free(sequence)

    def check_integrity(self) -> Counter[int]:
        """Assert that only the running sequences hold blocks. Returns how often each block is held."""
        assert not self.waiting.keys() & self.running.keys(), "a request waits and runs"
        assert all(not sequence.block_table for sequence in self.waiting.values()), "a waiting request holds blocks"
        assert len(self.running) <= self._config.max_running, "more running than allowed"
        return self._tables.check_integrity(self.running.values())

    def _has_place(self, sequence: Sequence, num_places: int) -> bool:
        """Whether its tenant has less than its share of the queue, of the tenants with live requests."""
        weights = {other.tenant: other.weight for other in self.all()} | {sequence.tenant: sequence.weight}
        num_own = sum(other.tenant == sequence.tenant for other in self.waiting.values())
        return has_place(len(self.waiting), num_places, num_own, sequence.weight / sum(weights.values()))

    def _check_can_run(self, sequence: Sequence) -> None:
        if self.find(sequence.request_id) is not None:
            raise InvalidRequest("request_id", f"{sequence.request_id!r} is in flight", "send a new one")
        limit = self._config.max_beam_rows
        if max(sequence.rows_by_level, default=0) > limit:
            raise InvalidRequest("beam_width", "more beams than a step runs", f"send at most {limit}")

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.request_id]
        self._free(sequence)
        sequence.restart()
        self.waiting[sequence.request_id] = sequence

    def _free(self, sequence: Sequence) -> None:
        self._tables.free(sequence)
        sequence.beams = None
