"""Who runs in the next step: continuous batching of prefill chunks, text decode and beam steps under two budgets.

Pure: no torch, no clock, no randomness; time is an argument. A step takes beam steps and decode tokens first, because
those requests hold memory and are nearest to done. Of the tokens that are left, half go to the shortest prompts of the best
class, so that a flood of long ones does not hold them up; the rest by urgency (priority, lowered by waiting), so that
nothing waits for ever. The shortest do not take the last place among those that run, nor are they admitted past the most
urgent one while that finds no memory. A request is admitted when its whole prompt has room, so only text decode can run
out of blocks: then the least urgent running sequence is put back in the queue and computed again later. The most urgent
one is never put back, so something always finishes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from services.contracts.access import places_for
from services.errors import InvalidRequest, Overloaded
from services.llm.engine.block_pool import BlockPool
from services.llm.engine.config import EngineConfig
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.prefix import PrefixNamer
from services.llm.engine.sequence import Sequence

_RETRY_AFTER_S = 0.1


class Scheduler:
    """Owns every live sequence and the block pool. `add`, `schedule`, `advance`, `finish`; all calls from one thread."""

    def __init__(self, config: EngineConfig, bundle_version: str) -> None:
        self.pool = BlockPool(config.num_blocks)
        self._config = config
        self._namer = PrefixNamer(bundle_version, config.block_tokens)
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Put a request in the queue. Raises Overloaded when its priority's places are full, InvalidRequest for what could never run."""
        if self.find(sequence.request_id) is not None:
            raise InvalidRequest("request_id", f"{sequence.request_id!r} is in flight", "send a new one")
        capacity = self.pool.num_blocks * self._config.block_tokens
        if len(sequence.tokens) + sequence.max_new_tokens > capacity:
            raise InvalidRequest("prompt", f"needs more than {capacity} cached tokens", "send a shorter one")
        if max(sequence.rows_by_level, default=0) > self._config.max_beam_rows:
            raise InvalidRequest(
                "beam_width", "more beams than a step runs", f"send at most {self._config.max_beam_rows}"
            )
        if len(self._waiting) >= places_for(sequence.priority, self._config.max_waiting):
            raise Overloaded("the engine's queue", _RETRY_AFTER_S)
        self._namer.extend(sequence.block_names, sequence.tokens)
        self._waiting[sequence.request_id] = sequence

    def find(self, request_id: str) -> Sequence | None:
        """Give the live sequence of this request, if any."""
        return self._running.get(request_id) or self._waiting.get(request_id)

    def schedule(self, now_s: float) -> StepPlan:
        """Decide the next step. Sequences past their deadline are ended here, their blocks free at once."""
        plan = StepPlan()
        self._end_late(plan, now_s)
        room = _Room(self._config.max_step_tokens, self._config.max_beam_rows)
        for sequence in self._by_urgency(self._running.values(), now_s):
            if sequence.request_id in self._running:
                self._plan_decode_or_beams(plan, room, sequence, now_s)
        self._plan_prompts(plan, room, now_s)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """Record that the step was started: tokens computed, full blocks findable, levels done; what is spent leaves its blocks.

        That is right before the device is done, because steps run one after another: who reads or takes a block runs later.
        """
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_steps += 1
            sequence.num_computed = chunk.end
            self._register_full_blocks(sequence, chunk.start)
            if chunk.is_last and sequence.num_levels:
                sequence.num_levels_done = 1
            elif chunk.is_last:
                sequence.is_token_awaited = True
        for sequence in plan.beam_steps:
            sequence.num_steps += 1
            sequence.num_levels_done += 1
        for sequence in (*(chunk.sequence for chunk in plan.chunks), *plan.beam_steps):
            if sequence.is_spent:
                self._leave(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, for whatever reason, and free its blocks."""
        sequence.has_ended = True
        if self.find(sequence.request_id) is sequence:
            self._leave(sequence)

    def check_integrity(self) -> None:
        """Prove that blocks are held exactly by the running sequences, each as often as it is referenced."""
        self.pool.check_integrity()
        assert not self._waiting.keys() & self._running.keys(), "a request waits and runs"
        assert all(not sequence.block_ids for sequence in self._waiting.values()), "a waiting request holds blocks"
        holds = Counter(block for sequence in self._running.values() for block in sequence.block_ids)
        assert holds == self.pool.references(), "references differ from what running requests hold"
        size = self._config.block_tokens
        assert all(s.num_computed <= len(s.block_ids) * size for s in self._running.values()), "tokens without a block"
        assert len(self._running) <= self._config.max_running, "more running than allowed"

    def _plan_decode_or_beams(self, plan: StepPlan, room: "_Room", sequence: Sequence, now_s: float) -> None:
        rows = sequence.num_beam_rows
        if sequence.decoding_s is None and (rows or sequence.is_decoding):
            sequence.decoding_s = now_s
        if rows and rows <= room.beam_rows:
            plan.beam_steps.append(sequence)
            room.beam_rows -= rows
        elif sequence.is_decoding and room.tokens and self._make_room(sequence, now_s):
            plan.chunks.append(Chunk(sequence, sequence.num_computed, 1))
            room.tokens -= 1

    def _plan_prompts(self, plan: StepPlan, room: "_Room", now_s: float) -> None:
        prefilling = [s for s in self._running.values() if s.num_to_compute and not s.is_decoding]
        waiting = self._by_urgency((s for s in self._waiting.values() if not s.is_held_back), now_s)
        counts: dict[Sequence, int] = {}
        half = room.tokens // 2
        shortest = sorted(prefilling + waiting, key=lambda s: (s.priority, s.num_to_compute))
        most = self._config.max_running - 1 if not waiting or self._has_room_for(waiting[0]) else 0
        room.tokens -= half - self._share_out(shortest, half, counts, now_s, most_running=most)
        urgent = self._by_urgency(prefilling + waiting, now_s)
        most = self._config.max_running
        room.tokens = self._share_out(urgent, room.tokens, counts, now_s, most_running=most)
        plan.chunks.extend(Chunk(sequence, sequence.num_computed, count) for sequence, count in counts.items())

    def _share_out(
        self, order: list[Sequence], tokens: int, counts: dict[Sequence, int], now_s: float, *, most_running: int
    ) -> int:
        """Add to what each one computes, in this order, and give the tokens left. Once one finds no room, no other is admitted."""
        admits = True
        for sequence in order:
            if not tokens:
                break
            if sequence.request_id not in self._running:
                admits = admits and len(self._running) < most_running and self._admit(sequence, now_s)
                if not admits:
                    continue
            planned = counts.get(sequence, 0)
            more = min(min(sequence.num_to_compute, self._config.max_chunk_tokens) - planned, tokens)
            if more:
                counts[sequence] = planned + more
                tokens -= more
        return tokens

    def _admit(self, sequence: Sequence, now_s: float) -> bool:
        if not self._place(sequence):
            return False
        del self._waiting[sequence.request_id]
        self._running[sequence.request_id] = sequence
        if sequence.started_s is None:
            sequence.started_s, sequence.num_cached = now_s, sequence.num_computed
        return True

    def _place(self, sequence: Sequence) -> bool:
        """Hold the cached prefix and allocate the rest. The last token is always computed: its hidden state is wanted."""
        if not self._has_room_for(sequence):
            return False
        cached = self._cached_blocks(sequence)
        self.pool.acquire(cached)
        sequence.block_ids = cached + self.pool.allocate(self._num_blocks(sequence) - len(cached))
        sequence.num_computed = len(cached) * self._config.block_tokens
        return True

    def _has_room_for(self, sequence: Sequence) -> bool:
        cached = self._cached_blocks(sequence)
        growing = sum(other.max_new_tokens > 0 for other in self._running.values())
        return self._num_blocks(sequence) - len(cached) + growing <= self.pool.num_free_without(cached)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        return self.pool.match(sequence.block_names[: (sequence.num_tokens - 1) // self._config.block_tokens])

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.num_tokens // self._config.block_tokens)

    def _make_room(self, sequence: Sequence, now_s: float) -> bool:
        """Give the sequence a block for its next token, putting the least urgent back if need be; False if that is itself."""
        if sequence.num_computed < len(sequence.block_ids) * self._config.block_tokens:
            return True
        while not self.pool.num_free:
            victim = self._by_urgency(self._running.values(), now_s)[-1]
            self._put_back(victim)
            if victim is sequence:
                return False
        sequence.block_ids += self.pool.allocate(1)
        return True

    def _put_back(self, sequence: Sequence) -> None:
        del self._running[sequence.request_id]
        self._free(sequence)
        sequence.restart()
        self._waiting[sequence.request_id] = sequence

    def _register_full_blocks(self, sequence: Sequence, start: int) -> None:
        size = self._config.block_tokens
        num_full = sequence.num_computed // size
        if num_full > len(sequence.block_names):
            self._namer.extend(sequence.block_names, sequence.tokens)
        for index in range(start // size, num_full):
            self.pool.register(sequence.block_ids[index], sequence.block_names[index])

    def _end_late(self, plan: StepPlan, now_s: float) -> None:
        for group in (self._waiting, self._running):
            late = [s for s in group.values() if s.deadline_s is not None and s.deadline_s <= now_s]
            plan.late.extend(late)
        for sequence in plan.late:
            self.finish(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.request_id, None)
        self._running.pop(sequence.request_id, None)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.beams = None

    def _by_urgency(self, group: Iterable[Sequence], now_s: float) -> list[Sequence]:
        ageing_s = self._config.ageing_s
        return sorted(group, key=lambda sequence: sequence.urgency(now_s, ageing_s))


@dataclass(slots=True)
class _Room:
    """What is left of the step's two budgets."""

    tokens: int
    beam_rows: int
