"""The teacher of a decoder with multi-code items: a decoder with one token per item, trained first on the same events.

    teacher/decoder/             Hugging Face layout
    teacher/catalogue.parquet    the same items, one token each

A row per item holds information that shared codes do not, so the teacher ranks better, and its distribution over items
is more informative than a single label. At each level the target mixes the label's code with the teacher's
probabilities of the codes below the label's prefix.

Shape suffixes: B windows, N items of a window, T learned items, C of them in a chunk, I items, E hidden of the teacher,
P prefixes, S codes of a level.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.catalogue import BOS_TOKEN, NUM_SPECIAL_TOKENS, Catalogue, load_catalogue
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder, save_decoder
from pipelines.scoring.dense import hidden_states
from pipelines.training.target.softmax import SeenItems, Teacher, seen_before

TEACHER = "teacher"
_CHUNK_SCORES = 1 << 22


def single_level(catalogue: Catalogue, size: int) -> Catalogue:
    """Return a catalogue whose windows of numbers below `size` have the tokens 1 + number."""
    numbers = np.arange(size, dtype=np.int32).reshape(-1, 1)
    return replace(catalogue, codes=numbers, level_sizes=(size,), first_tokens=None)


def save_teacher(decoder: Decoder, catalogue: Catalogue, folder: Path) -> None:
    """Write the teacher's decoder and its catalogue of depth 1."""
    save_decoder(decoder, folder / "decoder")
    catalogue.save(folder / "catalogue.parquet")


def load_teacher(trained: Path, device: torch.device) -> tuple[Decoder, Catalogue] | None:
    """Read the teacher stored with a decoder; None if it had none."""
    folder = trained / TEACHER
    if not folder.exists():
        return None
    return load_decoder(folder / "decoder", torch.float32, device), load_catalogue(folder / "catalogue.parquet")


@dataclass(frozen=True, slots=True)
class TargetCodes:
    """The teacher's part of each token's target, by code of one level; row sums are the teacher's weight."""

    shares_TS: Tensor

    def share(self, rows: slice, _penalty_CS: Tensor | None, _scores_CS: Tensor) -> Tensor:
        """Return (C, S): as `softmax.SoftTarget`."""
        return self.shares_TS[rows]


class ItemTeacher:
    """Returns the teacher's probabilities of codes at each level.

    Items are sorted by path, so the items below a prefix are a range, and their probability is a difference of running
    sums. `child_PS` is as in CodePaths. Items that share all codes are represented by the first
    of them in a history.
    """

    def __init__(
        self, decoder: Decoder, codes: np.ndarray, child_PS: list[Tensor], weight: float, *, mask_seen: bool
    ) -> None:
        device = decoder.embedding.weight.device
        self._decoder, self._weight, self._mask_seen = decoder.eval(), weight, mask_seen
        by_path = np.lexsort(codes.T[::-1])
        self._token_I = torch.from_numpy(by_path + NUM_SPECIAL_TOKENS).to(device)
        self._head_IE = decoder.head_weight_VD.detach()[self._token_I]
        self._child_PS, self._range_PS2 = child_PS, []
        node = np.zeros(len(codes), dtype=np.int64)
        for level, child in enumerate(child_PS):
            code = codes[by_path, level]
            range_PS2 = np.zeros((*child.shape, 2), dtype=np.int32)
            starts = np.flatnonzero(np.diff(node * child.shape[1] + code, prepend=-1))
            range_PS2[node[starts], code[starts]] = np.stack([starts, np.append(starts[1:], len(codes))], axis=1)
            self._range_PS2.append(torch.from_numpy(range_PS2).to(device))
            node = child.cpu().numpy()[node, code].astype(np.int64)

    @torch.no_grad()
    def targets(self, codes_BNX: Tensor, chosen_BN: Tensor) -> list[TargetCodes]:
        """Return the targets of all levels at the chosen items of windows, whose codes are negative for none."""
        places_BN = self._places(codes_BNX)
        before_BN = places_BN.roll(1, dims=1)
        tokens_BN = torch.where(before_BN < 0, BOS_TOKEN, self._token_I[before_BN.clamp(min=0)])
        tokens_BN[:, 0] = BOS_TOKEN
        hidden_TE = hidden_states(self._decoder, tokens_BN).view(*tokens_BN.shape, -1)[chosen_BN]
        seen = seen_before(places_BN, chosen_BN, len(self._token_I)) if self._mask_seen else None
        codes_TX, size = codes_BNX[chosen_BN], max(1, _CHUNK_SCORES // len(self._token_I))
        with torch.autocast(hidden_TE.device.type, enabled=False):  # probabilities of rare items need fp32
            chunks = [
                self._shares(hidden_TE, seen, codes_TX, slice(start, start + size))
                for start in range(0, max(1, len(codes_TX)), size)
            ]
        return [TargetCodes(torch.cat(level)) for level in zip(*chunks, strict=True)]

    def _places(self, codes_BNX: Tensor) -> Tensor:
        """Return each item's position in path order, -1 for none."""
        prefix_BN = torch.zeros_like(codes_BNX[..., 0])
        for child_PS, code_BN in zip(self._child_PS[:-1], codes_BNX.unbind(-1), strict=False):
            prefix_BN = child_PS[prefix_BN, code_BN.clamp(min=0)].clamp(min=0).long()
        places_BN = self._range_PS2[-1][prefix_BN, codes_BNX[..., -1].clamp(min=0), 0].long()
        return torch.where(codes_BNX[..., 0] < 0, -1, places_BN)

    def _shares(self, hidden_TE: Tensor, seen: SeenItems | None, codes_TX: Tensor, rows: slice) -> list[Tensor]:
        """Return the target's part of a chunk at each level, (C, S)."""
        hidden_CE, codes_CX = hidden_TE[rows], codes_TX[rows]
        penalty_CI = None if seen is None else seen.penalty(rows)
        share_CI = Teacher(hidden_CE, self._head_IE, 1.0).share(slice(None), penalty_CI, hidden_CE)
        running = torch.zeros(len(share_CI), share_CI.shape[1] + 1, dtype=torch.float64, device=share_CI.device)
        torch.cumsum(share_CI, dim=1, dtype=torch.float64, out=running[:, 1:])
        prefix_C, shares = torch.zeros_like(codes_CX[:, 0]), []
        for child_PS, range_PS2, code_C in zip(self._child_PS, self._range_PS2, codes_CX.unbind(1), strict=True):
            start_CS, end_CS = range_PS2[prefix_C].long().unbind(-1)
            below_CS = (running.gather(1, end_CS) - running.gather(1, start_CS)).clamp_(min=0)
            below_CS *= self._weight / below_CS.sum(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
            shares.append(below_CS.float())
            prefix_C = child_PS[prefix_C, code_C].long()
        return shares
