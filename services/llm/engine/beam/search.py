"""Beam search: from hidden states to the next beams, or to the items, of all ranking requests of a step.

Requests at the same level are batched, padded to the widest. Scores are log-probabilities over the catalogue's items
(computed only over the level's own code range) or over the whole vocabulary; masks do not change them. Each beam
is a dense tail in addition to the request's shared prompt. No step here waits for the device.

Shape suffixes: R requests, B beams of a request or of the step, W beams of one request, N kept, S codes of the level,
C candidates, X bytes of bits, D hidden, Y layers, L slots of a tail, G key/value heads, K head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from models.decoder.config import DecoderConfig
from services.llm.engine.beam.item_mask import RankWork
from services.llm.engine.beam.tails import Tails
from services.llm.engine.beam.top_k import TopK, choose_first, choose_next
from services.llm.engine.beam.trie import Level, Trie
from services.llm.engine.device import to_device
from services.llm.engine.sequence import BeamState, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Beams(BeamState):
    """One request's beams, best first.

    Their tails hold the keys and values of the `num_decoded` tokens before `token_W`.
    """

    num_decoded: int
    token_W: Tensor
    node_W: Tensor
    score_W: Tensor
    keys_YWLGK: Tensor
    values_YWLGK: Tensor

    @classmethod
    def of(cls, sequence: Sequence) -> "Beams":
        """Return the beams of a ranking whose first level is selected."""
        assert isinstance(sequence.beams, cls), "beam steps begin after the first level"
        return sequence.beams


class BeamBatch:
    """All beams of a step in one batch, requests in the given order. Owns copies of their tails for the step."""

    def __init__(self, sequences: list[Sequence]) -> None:
        parts = [Beams.of(sequence) for sequence in sequences]
        self.sequences = sequences
        self.token_B = torch.cat([part.token_W for part in parts])
        self.node_B = torch.cat([part.node_W for part in parts])
        self.score_B = torch.cat([part.score_W for part in parts])
        self.keys_YBLGK = torch.cat([part.keys_YWLGK for part in parts], dim=1)
        self.values_YBLGK = torch.cat([part.values_YWLGK for part in parts], dim=1)
        self._widths = np.array([len(part.token_W) for part in parts])
        self._first_rows = np.cumsum(self._widths) - self._widths
        decoded = np.array([part.num_decoded for part in parts]).repeat(self._widths)
        places = np.arange(self.keys_YBLGK.shape[2])
        self.tails = Tails(
            self.keys_YBLGK,
            self.values_YBLGK,
            self._on_device(decoded),
            self._on_device(places <= decoded[:, None]),
        )

    def rows_of(self, members: list[int]) -> tuple[Tensor, Tensor]:
        """Return the rows (R, B) of these requests' beams, padded with a request's last row, and the padding mask."""
        widths = self._widths[members][:, None]
        beam = np.arange(widths.max())
        rows = self._first_rows[members][:, None] + np.minimum(beam, widths - 1)
        return self._on_device(rows), self._on_device(beam >= widths)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.token_B.device)


Logits = Callable[[Tensor, int, int], Tensor]
"""(hidden (..., D), first, last) -> fp32 scores (..., last - first) of the tokens first to last - 1."""
_MAX_LOGITS = 1 << 24
"""Logits of the whole vocabulary in memory at a time."""


def level_logits(logits: Logits, level: Level, hidden: Tensor, vocab_size: int) -> Tensor:
    """Return the logits (..., S) of a level's tokens, or their log-probabilities over the vocabulary."""
    first, last = level.token_offset, level.token_offset + level.size
    if level.over_children:
        return logits(hidden, first, last)
    rows_RD = hidden.reshape(-1, hidden.shape[-1])
    parts = [
        logits(part_RD, 0, vocab_size).log_softmax(-1)[:, first:last]
        for part_RD in torch.split(rows_RD, max(1, _MAX_LOGITS // vocab_size))
    ]
    return torch.cat(parts).view(*hidden.shape[:-1], level.size)


@dataclass(frozen=True, slots=True, eq=False)
class RankedItems:
    """The items of one request's ranking, still on the device: best first, score -inf for padding."""

    sequence: Sequence
    item_W: Tensor
    score_W: Tensor


class BeamSearch:
    """Beam search with one decoder's head over one catalogue. Stateless: beams are stored on their sequences."""

    def __init__(self, config: DecoderConfig, logits: Logits, trie: Trie) -> None:
        self._config = config
        self._logits = logits
        self._trie = trie

    def begin(self, sequences: list[Sequence], hidden_RD: Tensor) -> list[RankedItems]:
        """Select the first level from the prompts' last hidden states. Returns the complete rankings (depth 1)."""
        level = self._trie.levels[0]
        top_k = choose_first(level, self._level_logits(level, hidden_RD), *_bits_and_width(sequences, 0))
        if self._trie.depth == 1:
            return _rankings(sequences, top_k, 0)
        for row, sequence in enumerate(sequences):
            width = RankWork.of(sequence).width_by_level[0]
            tail = self._empty_tail(width, hidden_RD)
            sequence.beams = _beams(0, level, top_k, row, width, tail, tail)
        return []

    def extend(self, batch: BeamBatch, hidden_BD: Tensor) -> list[RankedItems]:
        """Select the next level of every request in the batch. Returns the rankings that are complete."""
        levels_done = [sequence.num_levels_done for sequence in batch.sequences]
        order = sorted(range(len(levels_done)), key=levels_done.__getitem__)
        rankings: list[RankedItems] = []
        for level_index, members in groupby(order, key=levels_done.__getitem__):
            rankings += self._extend_level(level_index, batch, list(members), hidden_BD)
        return rankings

    def _extend_level(
        self, level_index: int, batch: BeamBatch, members: list[int], hidden_BD: Tensor
    ) -> list[RankedItems]:
        level = self._trie.levels[level_index]
        sequences = [batch.sequences[member] for member in members]
        rows_RB, padding_RB = batch.rows_of(members)
        score_RB = batch.score_B[rows_RB].masked_fill_(padding_RB, -torch.inf)
        logits_RBS = self._level_logits(level, hidden_BD[rows_RB])
        bits_RX, width = _bits_and_width(sequences, level_index)
        top_k = choose_next(level, batch.node_B[rows_RB], score_RB, logits_RBS, bits_RX, width)
        if level_index == self._trie.depth - 1:
            return _rankings(sequences, top_k, level_index)
        for row, sequence in enumerate(sequences):
            width = RankWork.of(sequence).width_by_level[level_index]
            parent_rows = rows_RB[row, top_k.parent_RN[row, :width]]
            keys, values = batch.keys_YBLGK[:, parent_rows], batch.values_YBLGK[:, parent_rows]
            sequence.beams = _beams(level_index, level, top_k, row, width, keys, values)
        return []

    def _level_logits(self, level: Level, hidden: Tensor) -> Tensor:
        return level_logits(self._logits, level, hidden, self._config.vocab_size)

    def _empty_tail(self, width: int, like: Tensor) -> Tensor:
        """Return a tail of zeros that uses no memory; it is copied before it is written."""
        config = self._config
        places, groups = self._trie.depth - 1, config.num_key_value_heads
        return like.new_zeros(()).expand(config.num_hidden_layers, width, places, groups, config.head_dim)


def _bits_and_width(sequences: list[Sequence], level_index: int) -> tuple[Tensor, int]:
    works = [RankWork.of(sequence) for sequence in sequences]
    bits_RX = torch.stack([work.item_mask.bits_by_level[level_index] for work in works])
    return bits_RX, max(work.width_by_level[level_index] for work in works)


def _rankings(sequences: list[Sequence], top_k: TopK, level_index: int) -> list[RankedItems]:
    widths = [RankWork.of(sequence).width_by_level[level_index] for sequence in sequences]
    return [
        RankedItems(sequence, top_k.child_RN[row, :width], top_k.score_RN[row, :width])
        for row, (sequence, width) in enumerate(zip(sequences, widths, strict=True))
    ]


def _beams(
    level_index: int, level: Level, top_k: TopK, row: int, width: int, keys_YWLGK: Tensor, values_YWLGK: Tensor
) -> Beams:
    node_W = top_k.child_RN[row, :width]
    return Beams(
        num_decoded=level_index,
        token_W=level.code_of_child[node_W] + level.token_offset,
        node_W=node_W,
        score_W=top_k.score_RN[row, :width],
        keys_YWLGK=keys_YWLGK,
        values_YWLGK=values_YWLGK,
    )
