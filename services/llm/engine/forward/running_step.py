"""A step on the device, and what it brings when somebody waits for it."""

from dataclasses import dataclass

import numpy as np
import torch

from services.llm.engine.beam.search import Ranking
from services.llm.engine.forward.transfer import Arriving
from services.llm.engine.schedule.sequence import Sequence
from services.llm.engine.text.parameters import Chosen
from services.llm.engine.text.sampling import Drawn

Tokens = list[tuple[list[Sequence], Drawn]]
"""Texts, and the token that is chosen for each of them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: complete rankings, and one new token for each text request whose chunk was its last."""

    rankings: list[tuple[Sequence, np.ndarray, np.ndarray]]
    tokens: list[tuple[Sequence, Chosen]]


class RunningStep:
    """A step on the device, and what it will bring: the texts that get a token, and the rankings that it completes."""

    def __init__(self, rankings: list[Ranking], drawn: Tokens) -> None:
        self._drawn = drawn
        self._rankings = rankings
        columns = [[ranking.item_W for ranking in rankings], [ranking.score_W for ranking in rankings]]
        self._ranked = Arriving([torch.cat(column) for column in columns] if rankings else [])

    def collect(self) -> StepResult:
        """Wait for the device."""
        tokens = [pair for sequences, drawn in self._drawn for pair in zip(sequences, drawn.chosen(), strict=True)]
        return StepResult(self._collect_rankings() if self._rankings else [], tokens)

    def _collect_rankings(self) -> list[tuple[Sequence, np.ndarray, np.ndarray]]:
        items, scores = self._ranked.arrays()
        ends = np.cumsum([len(ranking.item_W) for ranking in self._rankings])[:-1]
        found = []
        for ranking, item, score in zip(self._rankings, np.split(items, ends), np.split(scores, ends), strict=True):
            chosen = score > -np.inf
            found.append((ranking.sequence, item[chosen], score[chosen]))
        return found
