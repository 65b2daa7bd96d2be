"""All levels of beam search after the first as one captured step: from the first level's beams to the items.

Nothing between the levels returns to the host: the parents, tokens and tails of a level are selected from the previous
level.

Shape suffixes: R requests, W beams of one request, B = R * W, N selected candidates of a request, X bytes of mask bits,
D hidden, Y layers, L positions of a tail, G key/value heads, K head size, V levels.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.decoder.config import DecoderConfig
from services.llm.engine.beam.item_mask import RankWork
from services.llm.engine.beam.search import Beams, RankedItems, level_logits
from services.llm.engine.beam.tails import Tails
from services.llm.engine.beam.top_k import TopK, choose_next
from services.llm.engine.beam.trie import Level, Trie
from services.llm.engine.device import to_device
from services.llm.engine.forward.attention import UniformBatch
from services.llm.engine.forward.layers import LayerLoop, StepInputs
from services.llm.engine.gpu.graph_device import CapturedStep, GraphDevice
from services.llm.engine.gpu.graph_shapes import BeamShape
from services.llm.engine.gpu.step_table import StepTable
from services.llm.engine.sequence import Sequence


class BeamInputs:
    """The input tensors of captured beam steps: the first level's beams, and all levels' masks and widths.

    They stay in place, are sized for the widest step and are shared by all shapes; only one shape runs at a time. The
    tails of the first captured level are memory that the level itself writes.
    """

    def __init__(self, config: DecoderConfig, trie: Trie, max_rows: int, max_requests: int, dtype: torch.dtype) -> None:
        device, places = trie.device, trie.depth - 1
        self.token_B = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.node_B = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.score_B = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.width_VR = torch.zeros(trie.depth, max_requests, dtype=torch.int64, device=device)
        self.bits_by_level = [
            torch.zeros(max_requests, -(-level.num_children // 8), dtype=torch.uint8, device=device)
            for level in trie.levels
        ]
        tail_shape = (config.num_hidden_layers, max_rows, places, config.num_key_value_heads, config.head_dim)
        self.keys_YBLGK = torch.zeros(tail_shape, dtype=dtype, device=device)
        self.values_YBLGK = torch.zeros(tail_shape, dtype=dtype, device=device)

    def all(self) -> list[Tensor]:
        """Return every tensor that the steps read and that `fill` writes."""
        return [self.token_B, self.node_B, self.score_B, self.width_VR, *self.bits_by_level]

    def fill(self, sequences: list[Sequence], shape: BeamShape) -> None:
        """Copy these requests' beams in.

        Unused rows of a request get token 0 and score -inf; unused requests get empty masks.
        """
        self.token_B[: shape.num_rows].zero_()
        self.node_B[: shape.num_rows].zero_()
        self.score_B[: shape.num_rows].fill_(-torch.inf)
        widths = np.zeros((len(self.width_VR), shape.num_requests), dtype=np.int64)
        for bits_RX in self.bits_by_level[1:]:
            bits_RX[len(sequences) : shape.num_requests].zero_()
        for index, sequence in enumerate(sequences):
            beams, work = Beams.of(sequence), RankWork.of(sequence)
            rows = slice(index * shape.num_beams, index * shape.num_beams + len(beams.token_W))
            self.token_B[rows] = beams.token_W
            self.node_B[rows] = beams.node_W
            self.score_B[rows] = beams.score_W
            widths[:, index] = work.width_by_level
            for bits_RX, bits_X in zip(self.bits_by_level[1:], work.item_mask.bits_by_level[1:], strict=True):
                bits_RX[index] = bits_X
        self.width_VR[:, : shape.num_requests] = to_device(widths, self.width_VR.device)


@dataclass(frozen=True, slots=True, eq=False)
class _LevelBeams:
    """The beams that enter a level: all requests' rows, and their tails filled up to this level's slot."""

    token_B: Tensor
    node_RW: Tensor
    score_RW: Tensor
    keys_YBLGK: Tensor
    values_YBLGK: Tensor

    def tails(self, num_decoded: int) -> Tails:
        place_L = torch.arange(self.keys_YBLGK.shape[2], device=self.token_B.device)
        return Tails(
            self.keys_YBLGK,
            self.values_YBLGK,
            torch.full_like(self.token_B, num_decoded),
            (place_L <= num_decoded).expand(len(self.token_B), -1).contiguous(),
        )

    def next(self, level: Level, chosen: TopK, width_R: Tensor) -> "_LevelBeams":
        """Return the beams after a level, with the tails of their parents.

        Each request keeps its width at that level.
        """
        num_requests, num_beams = self.score_RW.shape
        padding = (0, num_beams - chosen.child_RN.shape[1])
        rank_W = torch.arange(num_beams, device=width_R.device)
        score_RW = functional.pad(chosen.score_RN, padding, value=-torch.inf)
        node_RW = functional.pad(chosen.child_RN, padding).clamp_min_(0)
        first_row_R1 = torch.arange(0, num_requests * num_beams, num_beams, device=width_R.device).unsqueeze(-1)
        parent_row_B = (functional.pad(chosen.parent_RN, padding) + first_row_R1).flatten()
        return _LevelBeams(
            (level.code_of_child[node_RW] + level.token_offset).long().flatten(),
            node_RW,
            score_RW.masked_fill(rank_W >= width_R.unsqueeze(-1), -torch.inf),
            _gather(self.keys_YBLGK, parent_row_B),
            _gather(self.values_YBLGK, parent_row_B),
        )


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
        vocab_size: int,
    ) -> None:
        self._shape = shape
        self._vocab_size = vocab_size
        self._forward = forward
        self._trie = trie
        self._table = table
        self._inputs = inputs
        self.step = CapturedStep(device, self._body, [table.numbers, *inputs.all()], lambda: self._fill([]))

    def run(self, sequences: list[Sequence]) -> list[RankedItems]:
        """Select all levels of these requests, whose first level is already selected. Does not wait."""
        self._fill(sequences)
        item_RN, score_RN = (output.clone() for output in self.step.replay())
        widths = [RankWork.of(sequence).width_by_level[-1] for sequence in sequences]
        return [
            RankedItems(sequence, item_RN[index, :width], score_RN[index, :width])
            for index, (sequence, width) in enumerate(zip(sequences, widths, strict=True))
        ]

    def _fill(self, sequences: list[Sequence]) -> None:
        self._table.fill(sequences, self._shape.num_requests)
        self._inputs.fill(sequences, self._shape)

    def _body(self) -> tuple[Tensor, ...]:
        shape, inputs = self._shape, self._inputs
        rows, of_requests = slice(shape.num_rows), slice(shape.num_requests)
        batch = self._table.batch(shape.num_requests, shape.num_beams)
        node_RW, score_RW = (
            column[rows].view(shape.num_requests, shape.num_beams) for column in (inputs.node_B, inputs.score_B)
        )
        tails = inputs.keys_YBLGK[:, rows], inputs.values_YBLGK[:, rows]
        beams = _LevelBeams(inputs.token_B[rows], node_RW, score_RW, *tails)
        for index, level in enumerate(self._trie.levels[1:], start=1):
            at_level = replace(batch, position_R=batch.position_R + (index - 1))
            logits_RWS = self._logits(level, beams, at_level, index - 1)
            bits_RX = inputs.bits_by_level[index][of_requests]
            chosen = choose_next(level, beams.node_RW, beams.score_RW, logits_RWS, bits_RX, shape.num_beams)
            if index < self._trie.depth - 1:
                beams = beams.next(level, chosen, inputs.width_VR[index, of_requests])
        return chosen.child_RN, chosen.score_RN

    def _logits(self, level: Level, beams: _LevelBeams, batch: UniformBatch, num_decoded: int) -> Tensor:
        position_RW = batch.position_R.unsqueeze(-1).expand(-1, batch.rows_per_request)
        step = StepInputs(
            beams.token_B,
            position_RW.flatten(),
            beams.token_B[:0],
            self._forward.prepare_uniform(batch),
            beams.tails(num_decoded),
        )
        hidden_BD = self._forward.hidden(step)
        logits_BS = level_logits(self._forward.logits, level, hidden_BD, self._vocab_size)
        return logits_BS.view(*beams.score_RW.shape, -1)


def _gather(tail_YBLGK: Tensor, row_B: Tensor) -> Tensor:
    """Return the tails of these rows. Layers and rows are indexed as one axis, so a GPU copies 16 bytes at a time."""
    num_layers, _, *row_shape = tail_YBLGK.shape
    stride = tail_YBLGK.stride(0) // tail_YBLGK.stride(1)
    first_Y1 = torch.arange(0, num_layers * stride, stride, device=row_B.device).unsqueeze(-1)
    flat = tail_YBLGK.as_strided((num_layers * stride, *row_shape), tail_YBLGK.stride()[1:])
    return flat[first_Y1 + row_B]
