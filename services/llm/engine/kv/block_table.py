"""Block tables: the blocks that each running sequence holds, with cached prefix blocks shared.

The module fills and empties `Sequence.block_table` from admission to end, keeps the pool's reference counts equal to
the tables, and registers full blocks in the prefix cache. The scratch block, numbered after the pool's last block,
replaces the entries of blocks behind the sliding window: no row reads it. Pure: no torch and no clock; it does not
decide what runs.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Tokens

import numpy as np

from models.decoder.window import Window
from services.llm.engine.config import EngineConfig
from services.llm.engine.kv.block_pool import BlockPool
from services.llm.engine.sequence import Sequence


class BlockNeed:
    """Number of KV blocks that a sequence of one model needs at once: all its blocks, or only the visible blocks.

    If every layer has a sliding window, blocks wholly behind it, except the blocks of the sinks, are not read again.
    `window` is the window of all layers; None if any layer has full attention.
    """

    def __init__(self, config: EngineConfig, window: Window | None) -> None:
        self._block_tokens = config.block_tokens
        self._num_blocks = config.num_blocks
        self._window = window
        self._num_sink_blocks = 0
        self._num_visible_blocks = 0
        if window is not None:
            longest_chunk = min(config.max_chunk_tokens, config.max_num_batched_tokens)
            self._num_sink_blocks = self._blocks_of(window.num_sinks)
            self._num_visible_blocks = self._blocks_of(window.size - 1 + longest_chunk) + 1

    def first_visible(self, num_computed: int) -> int:
        """Return the first block after the sinks' blocks that the tokens from `num_computed` on attend to."""
        if self._window is None:
            return 0
        return max(self._num_sink_blocks, self._window.start(num_computed) // self._block_tokens)

    def behind(self, num_computed: int) -> slice:
        """Return the table entries of the blocks that no token from `num_computed` on attends to."""
        return slice(self._num_sink_blocks, self.first_visible(num_computed))

    def table_len(self, num_computed: int, num_tokens: int) -> int:
        """Return the length of a block table for `num_computed` tokens and the longest chunk after them.

        The tokens are at most `num_tokens` in all.
        """
        needed = self._blocks_of(num_tokens)
        if self._window is None:
            return needed
        return min(needed, self.first_visible(num_computed) + self._num_visible_blocks)

    def longest(self, num_tokens: int) -> int:
        """Limit `num_tokens` to the pool's capacity for a single sequence, computed in chunks from its beginning."""
        if self._window is not None and self._num_sink_blocks + self._num_visible_blocks <= self._num_blocks:
            return num_tokens
        return min(num_tokens, self._num_blocks * self._block_tokens)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)


class BlockTables:
    """The tables of one engine over a block pool, which engines of other versions may share, and its prefix cache."""

    def __init__(self, config: EngineConfig, need: BlockNeed, bundle_version: str, pool: BlockPool) -> None:
        self.pool = pool
        self._need = need
        self._block_tokens = config.block_tokens
        self._scratch_block = config.num_blocks
        self._hasher = PrefixHasher(bundle_version, config.block_tokens)

    def hash_blocks(self, sequence: Sequence) -> None:
        """Compute the hashes of the blocks that the sequence's tokens fill, for the prefix cache."""
        self._hasher.extend(sequence.block_hashes, sequence.tokens, sequence.cache_scope)

    def has_room_for(self, sequence: Sequence, num_reserved: int) -> bool:
        """Whether there are enough blocks for `place`, with `num_reserved` of them to spare."""
        cached = self._cached_blocks(sequence)
        num_computed = len(cached) * self._block_tokens
        num_new = self._need.table_len(num_computed, sequence.num_tokens) - len(cached)
        del cached[self._need.behind(num_computed)]
        return num_new + num_reserved <= self.pool.num_free_without(cached)

    def place(self, sequence: Sequence) -> None:
        """Acquire the cached prefix and allocate the blocks after it.

        The last token is always computed: its hidden state is needed.
        """
        sequence.block_table = self._cached_blocks(sequence)
        sequence.num_computed_tokens = len(sequence.block_table) * self._block_tokens
        self.pool.acquire(sequence.block_table)
        self._release_behind(sequence, 0)
        self.extend(sequence)

    def num_missing(self, sequence: Sequence) -> int:
        """Return the number of blocks that the sequence's next tokens need and that it does not hold."""
        return self._need.table_len(sequence.num_computed_tokens, sequence.num_tokens) - len(sequence.block_table)

    def extend(self, sequence: Sequence) -> None:
        """Allocate the missing blocks. The caller has checked the pool's `num_free`."""
        sequence.block_table += self.pool.allocate(self.num_missing(sequence))

    def record(self, sequence: Sequence, start: int) -> None:
        """Register the blocks filled by the tokens from `start`, and release blocks that are now behind the window."""
        num_known = min(sequence.num_computed_tokens, len(sequence.tokens))
        num_full = num_known // self._block_tokens
        if num_full > len(sequence.block_hashes):
            self.hash_blocks(sequence)
        for index in range(max(start - 1, 0) // self._block_tokens, num_full):  # the last token may be new
            if sequence.block_table[index] != self._scratch_block:
                self.pool.register(sequence.block_table[index], sequence.block_hashes[index])
        self._release_behind(sequence, start)

    def free(self, sequence: Sequence) -> None:
        """Release all blocks."""
        self.pool.release(self._held(sequence))
        sequence.block_table = []

    def check_integrity(self, running: Iterable[Sequence]) -> Counter[int]:
        """Assert that these sequences hold the blocks they need, and no block behind a window.

        Returns how often each block is held.
        """
        self.pool.check_integrity()
        holds: Counter[int] = Counter()
        for sequence in running:
            table, behind = sequence.block_table, self._need.behind(sequence.num_computed_tokens)
            assert sequence.num_computed_tokens <= len(table) * self._block_tokens, "tokens without a block"
            assert set(table[behind]) <= {self._scratch_block}, "a block behind the window is held"
            assert len(self._held(sequence)) == len(table) - len(table[behind]), "a visible block is not held"
            holds.update(self._held(sequence))
        return holds

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        return self.pool.match(sequence.block_hashes[: (sequence.num_tokens - 1) // self._block_tokens])

    def _held(self, sequence: Sequence) -> list[int]:
        return [block for block in sequence.block_table if block != self._scratch_block]

    def _release_behind(self, sequence: Sequence, start: int) -> None:
        first, end = self._need.first_visible(start), self._need.first_visible(sequence.num_computed_tokens)
        if first < end:
            self.pool.release(sequence.block_table[first:end])
            sequence.block_table[first:end] = [self._scratch_block] * (end - first)


class PrefixHasher:
    """Block hashes of the prefix cache, for one version of the weights.

    A hash chain over the version, a scope, and all tokens up to a block's end. Equal hashes mean equal tokens at equal
    positions under equal weights in one scope, so blocks are shared by hash only. The hash is cryptographic: a
    collision would serve one user's context to another.
    """

    def __init__(self, bundle_version: str, block_tokens: int) -> None:
        self._version = hashlib.blake2b(bundle_version.encode(), digest_size=16).digest()
        self._block_tokens = block_tokens

    def extend(self, hashes: list[bytes], tokens: Tokens[int], scope: bytes = b"") -> None:
        """Append the hashes of further blocks that `tokens` fill."""
        size = self._block_tokens
        first = len(hashes) * size
        flat = np.asarray(tokens[first : len(tokens) // size * size], dtype=np.int32).tobytes()
        parent = hashes[-1] if hashes else self._root_of(scope)
        for start in range(0, len(flat), 4 * size):
            parent = hashlib.blake2b(parent + flat[start : start + 4 * size], digest_size=16).digest()
            hashes.append(parent)

    def _root_of(self, scope: bytes) -> bytes:
        """Return the parent hash of a scope's first blocks.

        No block has this hash: block hashes are computed without `person`.
        """
        return hashlib.blake2b(self._version + scope, digest_size=16, person=b"scope").digest()
