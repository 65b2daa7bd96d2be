"""Who waits and who runs: the queue's places, the order of urgency, admission, and who is put back when blocks run out.

A sequence is admitted when its whole prompt has room (or, under windows, all of it that is seen at once), so only what grows can
run out of blocks: text decode, and a prompt whose blocks were freed as its windows passed. Then the least urgent one that
runs is put back in the queue and computed again later. The most urgent one is never put back, so something always finishes.
Pure: no torch, no clock; time is an argument.
"""

from collections.abc import Iterable

from services.contracts.access import places_for
from services.errors import InvalidRequest, Overloaded
from services.llm.engine.config import EngineConfig
from services.llm.engine.kv.block_table import BlockNeed, BlockTables
from services.llm.engine.schedule.sequence import Sequence

_RETRY_AFTER_S = 0.1


class LiveSequences:
    """Every sequence between `add` and `leave`: in `waiting`, where it holds no block, or in `running`, by request id."""

    def __init__(self, config: EngineConfig, need: BlockNeed, tables: BlockTables) -> None:
        self.waiting: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self._config = config
        self._need = need
        self._tables = tables

    def add(self, sequence: Sequence) -> None:
        """Put a request in the queue. Raises Overloaded when its priority's places are full, InvalidRequest for what could never run."""
        num_tokens = len(sequence.tokens) + sequence.max_new_tokens
        assert self._need.longest(num_tokens) == num_tokens, "longer than the pool, which intake refuses"
        self._check_can_run(sequence)
        if len(self.waiting) >= places_for(sequence.priority, self._config.max_waiting):
            raise Overloaded("the engine's queue", _RETRY_AFTER_S)
        self._tables.name(sequence)
        self.waiting[sequence.request_id] = sequence

    def find(self, request_id: str) -> Sequence | None:
        """Return the live sequence of this request, if any."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def by_urgency(self, group: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Sort: the most urgent goes first."""
        ageing_s = self._config.ageing_s
        return sorted(group, key=lambda sequence: sequence.urgency(now_s, ageing_s))

    def late(self, now_s: float) -> list[Sequence]:
        """Return those whose deadline has passed."""
        live = (*self.waiting.values(), *self.running.values())
        return [s for s in live if s.deadline_s is not None and s.deadline_s <= now_s]

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether it finds blocks enough, one being kept back for each running text."""
        num_growing = sum(other.max_new_tokens > 0 for other in self.running.values())
        return self._tables.has_room_for(sequence, num_growing)

    def admit(self, sequence: Sequence, now_s: float) -> bool:
        """Let a waiting sequence run if it finds room."""
        if not self.has_room_for(sequence):
            return False
        self._tables.place(sequence)
        self.running[sequence.request_id] = self.waiting.pop(sequence.request_id)
        if sequence.started_s is None:
            sequence.started_s, sequence.num_cached_tokens = now_s, sequence.num_computed_tokens
        return True

    def make_room(self, sequence: Sequence, now_s: float) -> bool:
        """Return a running sequence the blocks of its next tokens, putting the least urgent back if need be; False if that is itself."""
        num_missing = self._tables.num_missing(sequence)
        while self._tables.pool.num_free < num_missing:
            victim = self.by_urgency(self.running.values(), now_s)[-1]
            self._put_back(victim)
            if victim is sequence:
                return False
        self._tables.extend(sequence)
        return True

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        self.waiting.pop(sequence.request_id, None)
        self.running.pop(sequence.request_id, None)
        self._free(sequence)

    def check_integrity(self) -> None:
        """Prove that blocks are held exactly by the running sequences, each as often as it is referenced."""
        self._tables.check_integrity(self.running.values())
        assert not self.waiting.keys() & self.running.keys(), "a request waits and runs"
        assert all(not sequence.block_table for sequence in self.waiting.values()), "a waiting request holds blocks"
        assert len(self.running) <= self._config.max_running, "more running than allowed"

    def _check_can_run(self, sequence: Sequence) -> None:
        if self.find(sequence.request_id) is not None:
            raise InvalidRequest("request_id", f"{sequence.request_id!r} is in flight", "send a new one")
        most = self._config.max_beam_rows
        if max(sequence.rows_by_level, default=0) > most:
            raise InvalidRequest("beam_width", "more beams than a step runs", f"send at most {most}")

    def _put_back(self, sequence: Sequence) -> None:
        del self.running[sequence.request_id]
        self._free(sequence)
        sequence.restart()
        self.waiting[sequence.request_id] = sequence

    def _free(self, sequence: Sequence) -> None:
        self._tables.free(sequence)
        sequence.beams = None
