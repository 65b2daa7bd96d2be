"""One level of beam search as a recorded step: the beams in, the choice of the next beams or of the items out.

Shape suffixes: R requests, W beams of one request, B = R * W, N chosen of a request, X bytes of bits, D hidden.
"""

import torch
from torch import Tensor

from services.llm.engine.beam.beams import Beams
from services.llm.engine.beam.search import Ranking
from services.llm.engine.beam.top_k import choose_next
from services.llm.engine.beam.trie import Trie
from services.llm.engine.forward.layers import LayerLoop, StepInputs
from services.llm.engine.gpu.beam_inputs import BeamInputs
from services.llm.engine.gpu.graph_device import GraphDevice
from services.llm.engine.gpu.graph_shapes import BeamShape
from services.llm.engine.gpu.step_table import StepTable
from services.llm.engine.schedule.sequence import Sequence
from services.llm.engine.schedule.work import RankWork


class BeamGraph:
    """One recorded shape."""

    def __init__(
        self,
        shape: BeamShape,
        forward: LayerLoop,
        trie: Trie,
        table: StepTable,
        inputs: BeamInputs,
        device: GraphDevice,
    ) -> None:
        self._shape = shape
        self._forward = forward
        self._level = trie.levels[shape.level]
        self._is_last = shape.level == trie.depth - 1
        self._table = table
        self._inputs = inputs
        table.fill([], shape.num_requests)
        inputs.fill([], shape)
        self._recording = device.record(self._body, [table.numbers, *inputs.all()])

    def run(self, sequences: list[Sequence]) -> list[Ranking]:
        """Choose the next level of these requests. Gives the rankings that are complete. Waits for nothing."""
        self._table.fill(sequences, self._shape.num_requests)
        self._inputs.fill(sequences, self._shape)
        self._recording.replay()
        parent_row_RN, child_RN, score_RN, *more = (output.clone() for output in self._recording.outputs)
        if self._is_last:
            return _rankings(sequences, child_RN, score_RN)
        self._go_on(sequences, parent_row_RN, child_RN, score_RN, more[0])
        return []

    def _go_on(
        self, sequences: list[Sequence], parent_row_RN: Tensor, child_RN: Tensor, score_RN: Tensor, token_RN: Tensor
    ) -> None:
        """Return each request its new beams, with the tails of those that they come from."""
        parent_B = parent_row_RN[: len(sequences)].flatten()
        keys_YBLGK, values_YBLGK = self._inputs.tails_of(parent_B)
        for place, sequence in enumerate(sequences):
            width = _width_after(sequence)
            rows = slice(place * child_RN.shape[1], place * child_RN.shape[1] + width)
            sequence.beams = Beams(
                num_spelled=self._shape.level,
                token_W=token_RN[place, :width],
                node_W=child_RN[place, :width],
                score_W=score_RN[place, :width],
                keys_YWLGK=keys_YBLGK[:, rows],
                values_YWLGK=values_YBLGK[:, rows],
            )

    def _body(self) -> tuple[Tensor, ...]:
        shape, level = self._shape, self._level
        rows = self._table.rows(shape.num_requests, shape.num_beams)
        position_RW = rows.position_R.unsqueeze(-1).expand(-1, shape.num_beams)
        token_B = self._inputs.token_B[: shape.num_rows]
        hidden_BD = self._forward.hidden(
            StepInputs(
                token_B,
                position_RW.flatten(),
                token_B[:0],
                self._forward.prepare_regular(rows),
                self._inputs.tails(shape),
            )
        )
        logits_BS = self._forward.logits(hidden_BD, level.token_offset, level.token_offset + level.size)
        node_RW, score_RW = (
            column[: shape.num_rows].view(shape.num_requests, shape.num_beams)
            for column in (self._inputs.node_B, self._inputs.score_B)
        )
        chosen = choose_next(
            level,
            node_RW,
            score_RW,
            logits_BS.log_softmax(-1).view(shape.num_requests, shape.num_beams, -1),
            self._inputs.bits_by_level[shape.level][: shape.num_requests],
            shape.num_beams,
        )
        if self._is_last:
            return chosen
        first_row_R1 = torch.arange(0, shape.num_rows, shape.num_beams, device=token_B.device).unsqueeze(-1)
        parent_row_RN = chosen.parent_RN + first_row_R1
        token_RN = level.code_of_child[chosen.child_RN] + level.token_offset
        return parent_row_RN, chosen.child_RN, chosen.score_RN, token_RN


def _rankings(sequences: list[Sequence], item_RN: Tensor, score_RN: Tensor) -> list[Ranking]:
    widths = [_width_after(sequence) for sequence in sequences]
    return [
        Ranking(sequence, item_RN[place, :width], score_RN[place, :width])
        for place, (sequence, width) in enumerate(zip(sequences, widths, strict=True))
    ]


def _width_after(sequence: Sequence) -> int:
    assert isinstance(sequence.work, RankWork), "only rankings have levels"
    return sequence.work.width_by_level[sequence.num_levels_done]
