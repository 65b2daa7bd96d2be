"""How many KV blocks a sequence needs at once: all that its tokens fill, or only those that are still seen.

Where every layer has a sliding window, blocks wholly behind it, the sinks' apart, are seen by no row to come. Any layer without
one sees everything. Pure numbers: it knows no pool and no sequences.
"""

from models.decoder.window import Window
from services.llm.engine.config import EngineConfig


class BlockNeed:
    """Counts for one model. `window` is one that all its layers have, or None."""

    def __init__(self, config: EngineConfig, window: Window | None) -> None:
        self._block_tokens = config.block_tokens
        self._num_blocks = config.num_blocks
        self._window = window
        self._num_sink_blocks = 0
        self._num_seen_blocks = 0
        if window is not None:
            longest_chunk = min(config.max_chunk_tokens, config.max_step_tokens)
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
