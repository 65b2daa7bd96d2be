"""Sequences and steps as from the scheduler, and beams' tails, for tests without a scheduler."""

from typing import Any

import numpy as np
import torch

from services.llm.engine.beam.tails import Tails
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sequence import Sequence

PLACES = 3
"""Positions of a tail."""


def sequence_of(tokens: list[int] | int, blocks: list[int] | None = None, **fields: Any) -> Sequence:
    """Build a sequence of these tokens, or of this number of tokens, in these blocks; `fields` sets other fields."""
    known = {"request_id": "a", "order": 0, "priority": 0, "arrival_s": 0.0, "deadline_s": None, **fields}
    sequence = Sequence(tokens=[0] * tokens if isinstance(tokens, int) else tokens, **known)
    sequence.block_table = blocks or []
    return sequence


def step_of(
    chunks: list[tuple[int, int]], beams: list[tuple[int, int, int]], *, block_tokens: int, num_blocks: int
) -> StepPlan:
    """Build a step of chunks (start, tokens) and of beams (prompt tokens, rows, levels done), over shuffled blocks."""
    free = np.random.default_rng(5).permutation(num_blocks).tolist()

    def of_length(length: int, **fields: Any) -> Sequence:
        return sequence_of(length, [free.pop() for _ in range(-(-length // block_tokens))], **fields)

    return StepPlan(
        chunks=[Chunk(of_length(start + count), start, count) for start, count in chunks],
        beam_steps=[
            of_length(
                length,
                num_computed_tokens=length,
                num_levels=PLACES + 1,
                num_levels_done=done,
                rows_by_level=(rows,) * PLACES,
            )
            for length, rows, done in beams
        ],
    )


def tails_of(
    plan: StepPlan,
    layers: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tails | None:
    """Build random tails of a step's beams, as long as each request has decoded; None without beams."""
    if not plan.beam_steps:
        return None
    num_decoded_B = torch.tensor(
        [sequence.num_levels_done - 1 for sequence in plan.beam_steps for _ in range(sequence.num_beam_rows)],
        device=device,
    )
    keys_YBLGK, values_YBLGK = torch.randn(2, layers, len(num_decoded_B), PLACES, kv_heads, head_dim, device=device).to(
        dtype
    )
    return Tails(keys_YBLGK, values_YBLGK, num_decoded_B, torch.arange(PLACES, device=device) <= num_decoded_B[:, None])
