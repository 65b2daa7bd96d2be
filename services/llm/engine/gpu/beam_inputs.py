"""Where recorded beam steps read the beams: tokens, nodes, scores, tails and masks, in tensors that stay in place.

Shape suffixes: R requests, W beams of one request, B = R * W, N chosen beams of all requests, X bytes of bits, Y layers, L places
of a tail, G key/value heads, K head size.
"""

import torch
from torch import Tensor

from models.decoder.decoder import DecoderConfig
from services.llm.engine.beam.beams import Beams
from services.llm.engine.beam.tails import Tails
from services.llm.engine.beam.trie import Trie
from services.llm.engine.gpu.graph_shapes import BeamShape
from services.llm.engine.schedule.sequence import Sequence
from services.llm.engine.schedule.work import RankWork


class BeamInputs:
    """Room for the widest step, shared by all shapes, of which one runs at a time."""

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
        """Return every tensor that steps read."""
        return [self.token_B, self.node_B, self.score_B, self.keys_YBLGK, self.values_YBLGK, *self.bits_by_level]

    def tails(self, shape: BeamShape) -> Tails:
        """Return the tails of a shape's rows, as views: places before the level's own are filled."""
        num_rows, num_spelled = shape.num_rows, shape.level - 1
        place_L = torch.arange(self.keys_YBLGK.shape[2], device=self.token_B.device)
        return Tails(
            self.keys_YBLGK[:, :num_rows],
            self.values_YBLGK[:, :num_rows],
            torch.full_like(self.token_B[:num_rows], num_spelled),
            (place_L <= num_spelled).expand(num_rows, -1).contiguous(),
        )

    def tails_of(self, row_N: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the tails (Y, N, L, G, K) of these rows: cells of one flat row of them, which a GPU copies 16 bytes at a time."""
        num_layers, num_rows = self.keys_YBLGK.shape[:2]
        first_Y1 = torch.arange(0, num_layers * num_rows, num_rows, device=row_N.device).unsqueeze(-1)
        cell_YN = first_Y1 + row_N
        return self.keys_YBLGK.flatten(0, 1)[cell_YN], self.values_YBLGK.flatten(0, 1)[cell_YN]

    def fill(self, sequences: list[Sequence], shape: BeamShape) -> None:
        """Copy these requests' beams in. Rows beyond a request's own hold the first token and score -inf; requests beyond, nobody alive."""
        self.token_B[: shape.num_rows].zero_()
        self.node_B[: shape.num_rows].zero_()
        self.score_B[: shape.num_rows].fill_(-torch.inf)
        bits_RX = self.bits_by_level[shape.level]
        bits_RX[len(sequences) : shape.num_requests].zero_()
        for place, sequence in enumerate(sequences):
            beams, work = sequence.beams, sequence.work
            assert isinstance(beams, Beams), "beam steps begin with the first level's choice"
            assert isinstance(work, RankWork), "only rankings have beams"
            rows = slice(place * shape.num_beams, place * shape.num_beams + len(beams.token_W))
            self.token_B[rows] = beams.token_W
            self.node_B[rows] = beams.node_W
            self.score_B[rows] = beams.score_W
            if beams.num_spelled:
                spelled = slice(0, beams.num_spelled)
                self.keys_YBLGK[:, rows, spelled] = beams.keys_YWLGK[:, :, spelled]
                self.values_YBLGK[:, rows, spelled] = beams.values_YWLGK[:, :, spelled]
            bits_RX[place] = work.survivors.bits_by_level[shape.level]
