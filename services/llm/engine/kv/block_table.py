"""Which blocks each running sequence holds: its block table from admission to the end, the cached prefix in it shared.

It fills and empties `Sequence.block_table`, keeps the pool's holds equal to them, and makes full blocks findable. A place
whose block is behind the window has the scratch block, the one behind the pool's that is nobody's: no row sees it. Pure: no
torch and no clock; it does not decide who runs.
"""

from collections import Counter
from collections.abc import Iterable

from models.decoder.window import Window
from services.llm.engine.config import EngineConfig
from services.llm.engine.kv.block_pool import BlockPool
from services.llm.engine.kv.prefix_hashes import PrefixHasher
from services.llm.engine.schedule.sequence import Sequence


class BlockNeed:
    """Counts for one model. `window` is one that all its layers have, or None."""

    def __init__(self, config: EngineConfig, window: Window | None) -> None:
        self._block_tokens = config.block_tokens
        self._num_blocks = config.num_blocks
        self._window = window
        self._num_sink_blocks = 0
        self._num_seen_blocks = 0
        if window is not None:
            longest_chunk = min(config.max_chunk_tokens, config.max_num_batched_tokens)
            self._num_sink_blocks = self._blocks_of(window.num_sinks)
            self._num_seen_blocks = self._blocks_of(window.size - 1 + longest_chunk) + 1

    def first_seen(self, num_computed: int) -> int:
        """Return the first block, the sinks' apart, that the tokens from `num_computed` on see."""
        if self._window is None:
            return 0
        return max(self._num_sink_blocks, self._window.start(num_computed) // self._block_tokens)

    def behind(self, num_computed: int) -> slice:
        """Return the places of the blocks that no token from `num_computed` on sees."""
        return slice(self._num_sink_blocks, self.first_seen(num_computed))

    def table_len(self, num_computed: int, num_tokens: int) -> int:
        """Count the places of a block table that holds `num_computed` tokens and a longest chunk more, of at most `num_tokens`."""
        needed = self._blocks_of(num_tokens)
        if self._window is None:
            return needed
        return min(needed, self.first_seen(num_computed) + self._num_seen_blocks)

    def longest(self, num_tokens: int) -> int:
        """Cut so many tokens to what the pool can serve to one sequence alone, computed from its beginning in chunks."""
        if self._window is not None and self._num_sink_blocks + self._num_seen_blocks <= self._num_blocks:
            return num_tokens
        return min(num_tokens, self._num_blocks * self._block_tokens)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)


class BlockTables:
    """Owns the block pool and, through it, the prefix cache of one version of the weights."""

    def __init__(self, config: EngineConfig, need: BlockNeed, bundle_version: str) -> None:
        self.pool = BlockPool(config.num_blocks)
        self._need = need
        self._block_tokens = config.block_tokens
        self._scratch_block = config.num_blocks
        self._namer = PrefixHasher(bundle_version, config.block_tokens)

    def name(self, sequence: Sequence) -> None:
        """Name the blocks that the sequence's tokens fill, so that its prefix can be found."""
        self._namer.extend(sequence.block_hashes, sequence.tokens)

    def has_room_for(self, sequence: Sequence, num_kept_back: int) -> bool:
        """Whether `place` has blocks enough, and leaves `num_kept_back` of them."""
        cached = self._cached_blocks(sequence)
        num_computed = len(cached) * self._block_tokens
        num_new = self._need.table_len(num_computed, sequence.num_tokens) - len(cached)
        del cached[self._need.behind(num_computed)]
        return num_new + num_kept_back <= self.pool.num_free_without(cached)

    def place(self, sequence: Sequence) -> None:
        """Hold the cached prefix and allocate what comes behind it. The last token is always computed: its hidden state is wanted."""
        sequence.block_table = self._cached_blocks(sequence)
        sequence.num_computed_tokens = len(sequence.block_table) * self._block_tokens
        self.pool.acquire(sequence.block_table)
        self._leave_behind(sequence, 0)
        self.extend(sequence)

    def num_missing(self, sequence: Sequence) -> int:
        """Count the blocks that the sequence's next tokens need and that it does not hold."""
        return self._need.table_len(sequence.num_computed_tokens, sequence.num_tokens) - len(sequence.block_table)

    def extend(self, sequence: Sequence) -> None:
        """Allocate what is missing. The caller has checked the pool's `num_free`."""
        sequence.block_table += self.pool.allocate(self.num_missing(sequence))

    def record(self, sequence: Sequence, start: int) -> None:
        """Make findable what the tokens from `start` on have filled, and let go of what is behind the window now."""
        num_full = sequence.num_computed_tokens // self._block_tokens
        if num_full > len(sequence.block_hashes):
            self.name(sequence)
        for index in range(start // self._block_tokens, num_full):
            self.pool.register(sequence.block_table[index], sequence.block_hashes[index])
        self._leave_behind(sequence, start)

    def free(self, sequence: Sequence) -> None:
        """Let go of every block."""
        self.pool.release(self._held(sequence))
        sequence.block_table = []

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Prove that blocks are held exactly by these, each as often as it is referenced, and none behind a window."""
        self.pool.check_integrity()
        holds: Counter[int] = Counter()
        for sequence in running:
            table, behind = sequence.block_table, self._need.behind(sequence.num_computed_tokens)
            assert sequence.num_computed_tokens <= len(table) * self._block_tokens, "tokens without a block"
            assert set(table[behind]) <= {self._scratch_block}, "a block behind the window is held"
            assert len(self._held(sequence)) == len(table) - len(table[behind]), "a block that is seen is not held"
            holds.update(self._held(sequence))
        assert holds == self.pool.references(), "references differ from what running requests hold"

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        return self.pool.match(sequence.block_hashes[: (sequence.num_tokens - 1) // self._block_tokens])

    def _held(self, sequence: Sequence) -> list[int]:
        return [block for block in sequence.block_table if block != self._scratch_block]

    def _leave_behind(self, sequence: Sequence, start: int) -> None:
        first, end = self._need.first_seen(start), self._need.first_seen(sequence.num_computed_tokens)
        if first < end:
            self.pool.release(sequence.block_table[first:end])
            sequence.block_table[first:end] = [self._scratch_block] * (end - first)
