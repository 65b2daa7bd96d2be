"""The columns of a captured step: positions, slots and limits of its requests, and of the rows that only pad."""

import torch

from services.llm.engine.gpu.step_table import StepTable
from tests.support.training.sequences import sequence_of

BLOCK, SCRATCH = 4, 99


def test_rows_have_their_slots_and_padding_has_the_scratch_block() -> None:
    """A text's last token has its slot, beams the position after their prompt; a padding row reads and writes the scratch block alone."""
    table = StepTable(4, max_context=40, block_tokens=BLOCK, scratch_block=SCRATCH, device=torch.device("cpu"))
    table.numbers.fill_(2**40)
    text = sequence_of([7, 8, 9, 5, 6], [3, 10])
    ranking = sequence_of([1, 2, 3], [4, 5], num_computed_tokens=3, num_levels=3, num_levels_done=2)

    table.fill([text, ranking], 3)

    columns = {name: column.tolist() for name, column in table.columns(3).items()}
    blocks = table.batch(3, 1).block_table_N.tolist()
    assert columns["token"] == [6, 0, 0]
    assert columns["position"] == [4, 4, 0]
    assert columns["slot_mapping"] == [10 * BLOCK, 0, SCRATCH * BLOCK]
    assert columns["limit"] == [5, 3, 1]
    assert [blocks[first] for first in columns["first_block"]] == [3, 4, SCRATCH]
    assert blocks[1] == 10


def test_tokens_that_the_host_awaits_are_taken_from_the_step_before() -> None:
    """A text with a pending token has the one of its row in the last step, one whose token is known its own, and padding token 0."""
    table = StepTable(4, max_context=40, block_tokens=BLOCK, scratch_block=SCRATCH, device=torch.device("cpu"))
    awaited, known = sequence_of([7, 8, 9], [3]), sequence_of([1, 2**40], [4])
    table.keep([([known], torch.tensor([50])), ([awaited], torch.tensor([60]))])
    awaited.num_pending = 1

    table.fill([awaited, known], 3)

    assert table.tokens(3).tolist() == [60, 2**40, 0]
    assert table.columns(3)["position"].tolist() == [3, 1, 0]


def test_columns_begin_where_kernels_expect_them() -> None:
    """For any number of requests, each column lies at a multiple of 16 bytes."""
    table = StepTable(5, max_context=40, block_tokens=BLOCK, scratch_block=SCRATCH, device=torch.device("cpu"))
    start = table.numbers.data_ptr()

    places = [column.data_ptr() - start for size in range(1, 6) for column in table.columns(size).values()]

    assert all(place % 16 == 0 for place in places)
