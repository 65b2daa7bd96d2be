"""The block pool under random use: every block has one state, references are honoured, eviction is oldest first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.llm.engine.kv.block_pool import BlockPool

NUM_BLOCKS = 8


class BlockPoolMachine(RuleBasedStateMachine):
    """Random holders allocate, fill, share and release blocks; a naive model tracks holders and cached blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.freed_order: list[int] = []
        self.num_names = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        """Allocation succeeds if enough blocks are free; it takes blank blocks first, then the least recently used."""
        if count > self.pool.num_free:
            with pytest.raises(AssertionError, match="beyond num_free"):
                self.pool.allocate(count)
            return
        num_blank = NUM_BLOCKS - self.pool.num_held - len(self.freed_order)

        blocks = self.pool.allocate(count)

        evicted = [block for block in blocks if block in self.freed_order]
        assert evicted == self.freed_order[: max(0, count - num_blank)]
        for block in evicted:
            self.freed_order.remove(block)
            del self.content[block]
        assert not set(blocks) & {block for held in self.holders for block in held}
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """A filled block can be found by its hash from then on, unless it already has a hash."""
        block = data.draw(st.sampled_from([block for held in self.holders for block in held]))
        self.num_names += 1

        self.pool.register(block, str(self.num_names).encode())

        self.content.setdefault(block, str(self.num_names).encode())

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def fill_with_known_content(self, data: st.DataObject) -> None:
        """Content that another block already has is ignored."""
        held = [block for blocks in self.holders for block in blocks if block not in self.content]
        if held:
            self.pool.register(
                data.draw(st.sampled_from(held)), data.draw(st.sampled_from(list(self.content.values())))
            )

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A cached block, held or not, can be acquired again."""
        block, name = data.draw(st.sampled_from(list(self.content.items())))

        assert self.pool.match([name, b"unknown", name]) == [block]
        assert self.pool.num_free_without([block]) == self.pool.num_free - (block in self.freed_order)
        self.pool.acquire([block])

        if block in self.freed_order:
            self.freed_order.remove(block)
        self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Released blocks are free once they have no holder, and cached blocks stay findable."""
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))

        self.pool.release(blocks)

        still_held = {block for held in self.holders for block in held}
        self.freed_order += [block for block in reversed(blocks) if block in self.content and block not in still_held]

    @invariant()
    def counts_agree_with_the_model(self) -> None:
        """References, free and cached blocks equal the model; free and held blocks add up to the total."""
        self.pool.check_integrity()
        held = {block for blocks in self.holders for block in blocks}
        assert self.pool.references().keys() == held
        assert self.pool.references().total() == sum(len(blocks) for blocks in self.holders)
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert self.pool.num_cached == len(self.content)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=50, stateful_step_count=30)


def test_releasing_twice_is_an_error() -> None:
    """A block without a holder cannot be released."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)

    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)
