"""Waiting and running sequences: the size of the queue, the order of urgency, admission, and preemption when blocks run out.

A sequence is admitted when there are blocks for its whole prompt (with sliding windows: for the part that is visible at
once). So blocks can only run out for text decode, and for a prompt whose blocks were freed as its windows passed. Then the
least urgent running sequence is preempted: it goes back to the queue and is computed again later. The most urgent one is
never preempted, so something always finishes. Pure: no torch, no clock; time is an argument.
"""

from collections import Counter
from collections.abc import Iterable

from services.contracts.access import places_for
from services.errors import InvalidRequest, Overloaded
from services.llm.engine.config import EngineConfig
from services.llm.engine.kv.block_table import BlockNeed, BlockTables
from services.llm.engine.schedule.sequence import Sequence

_RETRY_AFTER_S = 0.1


class LiveSequences:
    """Every sequence between `add` and `remove`, by request id: in `waiting`, where it holds no block, or in `running`."""

    def __init__(self, config: EngineConfig, need: BlockNeed, tables: BlockTables) -> None:
        self.waiting: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self._config = config
        self._need = need
        self._tables = tables

    def add(self, sequence: Sequence) -> None:
        """Add a request to the queue. Raises Overloaded when its priority's share of the queue is full, InvalidRequest if it could never run."""
        num_tokens = len(sequence.tokens) + sequence.max_new_tokens
        assert self._need.longest(num_tokens) == num_tokens, "longer than the pool, which admission refuses"
        self._check_can_run(sequence)
        if len(self.waiting) >= places_for(sequence.priority, self._config.max_waiting):
            raise Overloaded("the engine's queue", _RETRY_AFTER_S)
        self._tables.hash_blocks(sequence)
        self.waiting[sequence.request_id] = sequence

    def find(self, request_id: str) -> Sequence | None:
        """Return the live sequence of this request, if any."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def all(self) -> tuple[Sequence, ...]:
        """Return every live sequence."""
        return (*self.waiting.values(), *self.running.values())

    def by_urgency(self, group: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Return the group sorted, the most urgent first."""
        ageing_s = self._config.ageing_s
        return sorted(group, key=lambda sequence: sequence.urgency(now_s, ageing_s))

    def late(self, now_s: float) -> list[Sequence]:
        """Return the sequences whose deadline has passed."""
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

    def make_room(self, sequence: Sequence, now_s: float) -> bool:
        """Allocate the blocks of a running sequence's next tokens, preempting the least urgent if needed; False if that is itself."""
        num_missing = self._tables.num_missing(sequence)
        while self._tables.pool.num_free < num_missing:
            victim = self.by_urgency(self.running.values(), now_s)[-1]
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
        """Assert that the running sequences, and they alone, hold blocks. Returns how often each block is held."""
        assert not self.waiting.keys() & self.running.keys(), "a request waits and runs"
        assert all(not sequence.block_table for sequence in self.waiting.values()), "a waiting request holds blocks"
        assert len(self.running) <= self._config.max_running, "more running than allowed"
        return self._tables.check_integrity(self.running.values())

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
