"""The block pool: reference counts, the prefix cache, and the eviction order.

Pure bookkeeping over block numbers: no tensors, no requests, no clock. Every block is in exactly one state:

    held       reference count > 0; may be cached too (registered under the hash of its content)
    evictable  reference count 0 and cached: reusable by its hash, or evicted when no block is blank, LRU first
    blank      reference count 0 and not cached
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 to num_blocks-1. All changes keep `check_integrity` true."""

    def __init__(self, num_blocks: int) -> None:
        self._num_references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._num_references)

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return: blank and evictable blocks."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Number of blocks that are registered under a hash, held or not."""
        return len(self._hash_of)

    def references(self) -> Counter[int]:
        return Counter({block: count for block, count in enumerate(self._num_references) if count > 0})

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of this hash chain.

        Does not acquire them: call `acquire` before any other change.
        """
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_without(self, blocks: Iterable[int]) -> int:
        """Return how many blocks `allocate` could return after these blocks are acquired."""
        return self.num_free - sum(block in self._evictable for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these cached blocks."""
        for block in blocks:
            assert block in self._hash_of, "only cached blocks can be shared"
            self._evictable.pop(block, None)
            self._num_references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return blocks with one reference each; their content is undefined. The caller has checked `num_free`."""
        assert count <= self.num_free, "allocation beyond num_free"
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        """Register a held, full block under its hash. No effect if another block has that hash already."""
        assert self._num_references[block] > 0, "only held blocks are filled"
        if digest not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block.

        Later blocks of a chain are evicted first, because they are useless without the earlier blocks.
        """
        for block in reversed(blocks):
            assert self._num_references[block] > 0, "released more often than held"
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                self._set_free(block)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and that hashes map both ways."""
        blank, evictable = set(self._blank), set(self._evictable)
        held = {block for block, count in enumerate(self._num_references) if count > 0}
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not (blank & evictable) | (blank & held) | (evictable & held), "a block is in two states"
        assert len(blank) + len(evictable) + len(held) == self.num_blocks, "a block is lost"
        assert min(self._num_references) >= 0, "a negative reference count"
        assert evictable <= self._hash_of.keys(), "an evictable block without a hash"
        assert not blank & self._hash_of.keys(), "a blank block with a hash"
        assert {digest: block for block, digest in self._hash_of.items()} == self._block_of, (
            "hashes do not map both ways"
        )

    def _set_free(self, block: int) -> None:
        if block in self._hash_of:
            self._evictable[block] = None
        else:
            self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block
