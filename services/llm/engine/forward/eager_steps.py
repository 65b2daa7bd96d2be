"""Runs any step as it comes: lays its rows out flat, runs them through the decoder once, and chooses what comes next.

Rows are the chunks' tokens and then the beams, in plan order. It decides nothing and keeps no requests; beams live on
their sequences.

Shape suffixes: T rows of the step, P rows that go to the paged cache, B beams, D hidden, R requests, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.beam.beams import BeamBatch
from services.llm.engine.beam.search import Ranker, Ranking
from services.llm.engine.forward.layers import Forward, StepInputs
from services.llm.engine.forward.running_step import Tokens
from services.llm.engine.forward.transfer import to_device
from services.llm.engine.schedule.plan import Chunk, StepPlan
from services.llm.engine.schedule.sequence import Sequence
from services.llm.engine.text.draw import Draw
from services.llm.engine.text.sampling import sample


class EagerSteps:
    """Steps of one decoder over its KV cache. `ranker` None: text alone."""

    def __init__(
        self, forward: Forward, ranker: Ranker | None, vocab_size: int, block_tokens: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._ranker = ranker
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._device = device

    def run(self, plan: StepPlan) -> tuple[list[Ranking], Tokens]:
        """Start a step that is not empty. Gives the rankings that it completes, and the texts' tokens. Waits for nothing."""
        beams = BeamBatch(plan.beam_steps) if plan.beam_steps else None
        tokens_T, positions_T = self._lay_out(plan, beams)
        slots_P = self._slots_of(plan)
        tails = beams.tails if beams is not None else None
        step = StepInputs(tokens_T, positions_T, slots_P, self._forward.prepare(plan), tails)
        return self._choose(plan, beams, self._forward.hidden(step))

    def _lay_out(self, plan: StepPlan, beams: BeamBatch | None) -> tuple[Tensor, Tensor]:
        tokens = [token for chunk in plan.chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]]
        ranges = [np.arange(chunk.start, chunk.end) for chunk in plan.chunks]
        ranges += [
            np.full(sequence.num_beam_rows, len(sequence.tokens) + sequence.num_levels_done - 1)
            for sequence in plan.beam_steps
        ]
        tokens_T = self._on_device(np.array(tokens, dtype=np.int64))
        if beams is not None:
            tokens_T = torch.cat((tokens_T, beams.token_B))
        return tokens_T, self._on_device(np.concatenate(ranges))

    def _slots_of(self, plan: StepPlan) -> Tensor:
        slots = [_slots(chunk, self._block_tokens) for chunk in plan.chunks]
        return self._on_device(np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64))

    def _choose(self, plan: StepPlan, beams: BeamBatch | None, hidden_TD: Tensor) -> tuple[list[Ranking], Tokens]:
        ends = np.cumsum([chunk.num_tokens for chunk in plan.chunks]) - 1
        ending = [(chunk.sequence, end) for chunk, end in zip(plan.chunks, ends, strict=True) if chunk.is_last]
        ranked = [pair for pair in ending if pair[0].num_levels]
        texts = [pair for pair in ending if not pair[0].num_levels]
        rankings: list[Ranking] = []
        if self._ranker is not None and ranked:
            rankings += self._ranker.begin(*self._last_hidden(ranked, hidden_TD))
        if self._ranker is not None and beams is not None:
            rankings += self._ranker.extend(beams, hidden_TD[plan.num_tokens :])
        return rankings, self._sample(*self._last_hidden(texts, hidden_TD)) if texts else []

    def _last_hidden(self, ending: list[tuple[Sequence, int]], hidden_TD: Tensor) -> tuple[list[Sequence], Tensor]:
        rows = self._on_device(np.array([row for _, row in ending], dtype=np.int64))
        return [sequence for sequence, _ in ending], hidden_TD[rows]

    def _sample(self, sequences: list[Sequence], hidden_RD: Tensor) -> Tokens:
        logits_RV = self._forward.logits(hidden_RD, 0, self._vocab_size)
        return [(sequences, sample(logits_RV, [Draw.of(sequence) for sequence in sequences]))]

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)


def _slots(chunk: Chunk, block_tokens: int) -> np.ndarray:
    positions = np.arange(chunk.start, chunk.end)
    return np.array(chunk.sequence.block_ids)[positions // block_tokens] * block_tokens + positions % block_tokens
