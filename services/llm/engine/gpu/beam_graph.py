"""One level of beam search as a captured step: the beams are inputs, the selected next beams or items are outputs.

Shape suffixes: R requests, W beams of one request, B = R * W, N selected beams (of a request, or of all in `BeamInputs`), X bytes
of mask bits, D hidden, Y layers, L positions of a tail, G key/value heads, K head size.
"""

import torch
from torch import Tensor

from models.decoder.config import DecoderConfig
from services.llm.engine.beam.item_mask import RankWork
from services.llm.engine.beam.search import Beams, RankedItems
from services.llm.engine.beam.tails import Tails
from services.llm.engine.beam.top_k import choose_next
from services.llm.engine.beam.trie import Trie
from services.llm.engine.forward.layers import LayerLoop, StepInputs
from services.llm.engine.gpu.graph_device import GraphDevice
from services.llm.engine.gpu.graph_shapes import BeamShape
from services.llm.engine.gpu.step_table import StepTable
from services.llm.engine.schedule.sequence import Sequence


class BeamInputs:
    """The input tensors of captured beam steps: tokens, nodes, scores, tails and masks.

    They stay in place, hold the widest step and are shared by all shapes, of which one runs at a time.
    """

    def __init__(self, config: DecoderConfig, trie: Trie, max_rows: int, max_requests: int, dtype: torch.dtype) -> None:
        device, places = trie.device, trie.depth - 1
        self.token_B = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.node_B = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.score_B = torch.zeros(max_rows, dtype=torch.float32, device=device)
        tail_shape = (config.num_hidden_layers, max_rows, places, config.num_key_value_heads, config.head_dim)
        self.keys_YBLGK = torch.zeros(tail_shape, dtype=dtype, device=device)
        self.values_YBLGK = torch.zeros(tail_shape, dtype=dtype, device=device)
        self.bits_by_level = [
            torch.zeros(max_requests, -(-level.num_children // 8), dtype=torch.uint8, device=device)
            for level in trie.levels
        ]

    def all(self) -> list[Tensor]:
        """Return every tensor that the steps read."""
        return [self.token_B, self.node_B, self.score_B, self.keys_YBLGK, self.values_YBLGK, *self.bits_by_level]

    def tails(self, shape: BeamShape) -> Tails:
        """Return the tails of a shape's rows as views; the positions before the shape's level are filled."""
        num_rows, num_spelled = shape.num_rows, shape.level - 1
        place_L = torch.arange(self.keys_YBLGK.shape[2], device=self.token_B.device)
        return Tails(
            self.keys_YBLGK[:, :num_rows],
            self.values_YBLGK[:, :num_rows],
            torch.full_like(self.token_B[:num_rows], num_spelled),
            (place_L <= num_spelled).expand(num_rows, -1).contiguous(),
        )

    def tails_of(self, row_N: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the tails (Y, N, L, G, K) of these rows. Layers and rows are indexed as one axis, so a GPU copies 16 bytes at a time."""
        num_layers, num_rows = self.keys_YBLGK.shape[:2]
        first_Y1 = torch.arange(0, num_layers * num_rows, num_rows, device=row_N.device).unsqueeze(-1)
        cell_YN = first_Y1 + row_N
        return self.keys_YBLGK.flatten(0, 1)[cell_YN], self.values_YBLGK.flatten(0, 1)[cell_YN]

    def fill(self, sequences: list[Sequence], shape: BeamShape) -> None:
        """Copy these requests' beams in. Unused rows of a request get token 0 and score -inf; unused requests get an empty mask."""
        self.token_B[: shape.num_rows].zero_()
        self.node_B[: shape.num_rows].zero_()
        self.score_B[: shape.num_rows].fill_(-torch.inf)
        bits_RX = self.bits_by_level[shape.level]
        bits_RX[len(sequences) : shape.num_requests].zero_()
        for index, sequence in enumerate(sequences):
            beams, work = sequence.beams, sequence.work
            assert isinstance(beams, Beams), "beam steps begin with the first level's choice"
            assert isinstance(work, RankWork), "only rankings have beams"
            rows = slice(index * shape.num_beams, index * shape.num_beams + len(beams.token_W))
            self.token_B[rows] = beams.token_W
            self.node_B[rows] = beams.node_W
            self.score_B[rows] = beams.score_W
            if beams.num_spelled:
                spelled = slice(0, beams.num_spelled)
                self.keys_YBLGK[:, rows, spelled] = beams.keys_YWLGK[:, :, spelled]
                self.values_YBLGK[:, rows, spelled] = beams.values_YWLGK[:, :, spelled]
            bits_RX[index] = work.item_mask.bits_by_level[shape.level]


class BeamGraph:
    """One captured shape."""

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
        self._graph = device.capture(self._body, [table.numbers, *inputs.all()])

    def run(self, sequences: list[Sequence]) -> list[RankedItems]:
        """Select the next level of these requests. Returns the rankings that are complete. Does not wait."""
        self._table.fill(sequences, self._shape.num_requests)
        self._inputs.fill(sequences, self._shape)
        self._graph.replay()
        parent_row_RN, child_RN, score_RN, *more = (output.clone() for output in self._graph.outputs)
        if self._is_last:
            return _rankings(sequences, child_RN, score_RN)
        self._set_beams(sequences, parent_row_RN, child_RN, score_RN, more[0])
        return []

    def _set_beams(
        self, sequences: list[Sequence], parent_row_RN: Tensor, child_RN: Tensor, score_RN: Tensor, token_RN: Tensor
    ) -> None:
        """Set each request's new beams, with the tails of their parents."""
        parent_B = parent_row_RN[: len(sequences)].flatten()
        keys_YBLGK, values_YBLGK = self._inputs.tails_of(parent_B)
        for index, sequence in enumerate(sequences):
            width = _width_after(sequence)
            rows = slice(index * child_RN.shape[1], index * child_RN.shape[1] + width)
            sequence.beams = Beams(
                num_spelled=self._shape.level,
                token_W=token_RN[index, :width],
                node_W=child_RN[index, :width],
                score_W=score_RN[index, :width],
                keys_YWLGK=keys_YBLGK[:, rows],
                values_YWLGK=values_YBLGK[:, rows],
            )

    def _body(self) -> tuple[Tensor, ...]:
        shape, level = self._shape, self._level
        batch = self._table.batch(shape.num_requests, shape.num_beams)
        position_RW = batch.position_R.unsqueeze(-1).expand(-1, shape.num_beams)
        token_B = self._inputs.token_B[: shape.num_rows]
        hidden_BD = self._forward.hidden(
            StepInputs(
                token_B,
                position_RW.flatten(),
                token_B[:0],
                self._forward.prepare_uniform(batch),
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


def _rankings(sequences: list[Sequence], item_RN: Tensor, score_RN: Tensor) -> list[RankedItems]:
    widths = [_width_after(sequence) for sequence in sequences]
    return [
        RankedItems(sequence, item_RN[index, :width], score_RN[index, :width])
        for index, (sequence, width) in enumerate(zip(sequences, widths, strict=True))
    ]


def _width_after(sequence: Sequence) -> int:
    assert isinstance(sequence.work, RankWork), "only rankings have levels"
    return sequence.work.width_by_level[sequence.num_levels_done]
