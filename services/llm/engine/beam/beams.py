"""The beams of ranking requests: what each has spelled so far, as one dense tail beside the request's shared prompt.

Shape suffixes: W beams of one request, R requests, B beams of the step (or of the widest request), Y layers,
L places of the tail (depth - 1), G key/value heads, K head size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.transfer import to_device
from services.llm.engine.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Beams:
    """One request's beams, best first. Their tails hold the keys and values of the `num_spelled` tokens before `token_W`."""

    num_spelled: int
    token_W: Tensor
    node_W: Tensor
    score_W: Tensor
    keys_YWLGK: Tensor
    values_YWLGK: Tensor


class BeamBatch:
    """All beams of one step side by side, requests in the order given. Owns copies of their tails for the step."""

    def __init__(self, sequences: list[Sequence]) -> None:
        parts = [_beams_of(sequence) for sequence in sequences]
        self.sequences = sequences
        self.token_B = torch.cat([part.token_W for part in parts])
        self.node_B = torch.cat([part.node_W for part in parts])
        self.score_B = torch.cat([part.score_W for part in parts])
        self.keys_YBLGK = torch.cat([part.keys_YWLGK for part in parts], dim=1)
        self.values_YBLGK = torch.cat([part.values_YWLGK for part in parts], dim=1)
        self._widths = np.array([len(part.token_W) for part in parts])
        self._first_rows = np.cumsum(self._widths) - self._widths
        spelled = np.array([part.num_spelled for part in parts]).repeat(self._widths)
        places = np.arange(self.keys_YBLGK.shape[2])
        self.tails = Tails(
            self.keys_YBLGK,
            self.values_YBLGK,
            self._on_device(spelled),
            self._on_device(places <= spelled[:, None]),
        )

    def rows_of(self, members: list[int]) -> tuple[Tensor, Tensor]:
        """Return the rows (R, B) of these requests' beams, a short one padded with its last row, and where padding is (R, B) bool."""
        widths = self._widths[members][:, None]
        beam = np.arange(widths.max())
        rows = self._first_rows[members][:, None] + np.minimum(beam, widths - 1)
        return self._on_device(rows), self._on_device(beam >= widths)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.token_B.device)


def _beams_of(sequence: Sequence) -> Beams:
    assert isinstance(sequence.beams, Beams), "beam steps begin with the first level's choice"
    return sequence.beams
