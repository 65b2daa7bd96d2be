"""What runs in the next step: continuous batching of prefill chunks, text decode and beam steps under two budgets.

Pure: no torch, no clock, no randomness; time is an argument. A step takes beam steps and decode tokens first, because
those requests hold memory and are nearest to done. Of the tokens that are left, half go to the shortest prompts of the best
class, so that a flood of long ones does not hold them up; the rest by urgency (priority, lowered by waiting), so that
nothing waits for ever. The shortest do not take the last place among those that run, nor are they admitted past the most
urgent one while that finds no memory.
"""

from dataclasses import dataclass

from models.decoder.window import Window
from services.llm.engine.config import EngineConfig
from services.llm.engine.kv.block_pool import BlockPool
from services.llm.engine.kv.block_table import BlockNeed, BlockTables
from services.llm.engine.schedule.plan import Chunk, StepPlan
from services.llm.engine.schedule.queue import LiveSequences
from services.llm.engine.schedule.sequence import Sequence


class Scheduler:
    """Owns every live sequence and its blocks. `add`, `schedule`, `advance`, `finish`; all calls from one thread.

    `window` is one that all layers have: blocks behind it are freed while a sequence runs.
    """

    def __init__(self, config: EngineConfig, bundle_version: str, window: Window | None = None) -> None:
        need = BlockNeed(config, window)
        self._config = config
        self._tables = BlockTables(config, need, bundle_version)
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
        """Put a request in the queue. Raises Overloaded when its priority's places are full, InvalidRequest for what could never run."""
        self._live.add(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """Return the live sequence of this request, if any."""
        return self._live.find(request_id)

    def schedule(self, now_s: float) -> StepPlan:
        """Decide the next step. Sequences past their deadline are ended here, their blocks free at once."""
        plan = StepPlan(late=self._live.late(now_s))
        for sequence in plan.late:
            self.finish(sequence)
        room = _Room(self._config.max_num_batched_tokens, self._config.max_beam_rows)
        for sequence in self._live.by_urgency(self._live.running.values(), now_s):
            if sequence.request_id in self._live.running:
                self._plan_decode_or_beams(plan, room, sequence, now_s)
        self._plan_prompts(plan, room, now_s)
        return plan

    def advance(self, plan: StepPlan) -> None:
        """Record that the step was started: tokens computed, full blocks findable, levels done; what is spent leaves its blocks.

        That is right before the device is done, because steps run one after another: who reads or takes a block runs later.
        """
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens = chunk.end
            self._tables.record(sequence, chunk.start)
            if chunk.is_last and sequence.num_levels:
                sequence.num_levels_done = 1
            elif chunk.is_last:
                sequence.is_token_pending = True
        for sequence in plan.beam_steps:
            sequence.num_levels_done += 1
        for sequence in plan.sequences:
            sequence.num_steps += 1
            if sequence.is_fully_scheduled:
                self._live.leave(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, for whatever reason, and free its blocks."""
        sequence.has_ended = True
        if self.find(sequence.request_id) is sequence:
            self._live.leave(sequence)

    def check_integrity(self) -> None:
        """Prove that blocks are held exactly by the running sequences, each as often as it is referenced."""
        self._live.check_integrity()

    def _plan_decode_or_beams(self, plan: StepPlan, room: "_Room", sequence: Sequence, now_s: float) -> None:
        """Plan what runs on from its prompt, and give a prompt that runs the blocks of its next chunk."""
        rows = sequence.num_beam_rows
        if sequence.decoding_s is None and (rows or sequence.is_decoding):
            sequence.decoding_s = now_s
        if rows and rows <= room.beam_rows:
            plan.beam_steps.append(sequence)
            room.beam_rows -= rows
        elif sequence.num_to_compute and room.tokens and self._live.make_room(sequence, now_s) and sequence.is_decoding:
            plan.chunks.append(Chunk(sequence, sequence.num_computed_tokens, 1))
            room.tokens -= 1

    def _plan_prompts(self, plan: StepPlan, room: "_Room", now_s: float) -> None:
        live = self._live
        prefilling = [s for s in live.running.values() if s.num_to_compute and not s.is_decoding]
        waiting = live.by_urgency((s for s in live.waiting.values() if not s.is_held_back), now_s)
        counts: dict[Sequence, int] = {}
        half = room.tokens // 2
        shortest = sorted(prefilling + waiting, key=lambda s: (s.priority, s.num_to_compute))
        most = self._config.max_running - 1 if not waiting or live.has_room_for(waiting[0]) else 0
        room.tokens -= half - self._share_out(shortest, half, counts, now_s, most_running=most)
        urgent = live.by_urgency(prefilling + waiting, now_s)
        most = self._config.max_running
        room.tokens = self._share_out(urgent, room.tokens, counts, now_s, most_running=most)
        plan.chunks.extend(Chunk(sequence, sequence.num_computed_tokens, count) for sequence, count in counts.items())

    def _share_out(
        self, order: list[Sequence], tokens: int, counts: dict[Sequence, int], now_s: float, *, most_running: int
    ) -> int:
        """Add to what each one computes, in this order, and give the tokens left. Once one finds no room, no other is admitted."""
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
class _Room:
    """What is left of the step's two budgets."""

    tokens: int
    beam_rows: int
