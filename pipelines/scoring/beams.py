"""The decoder as it serves codes of any depth: its engine's beams as scores of items, and as targets for the student.

An item that no beam reached has the score -inf.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from models.catalogue import Catalogue
from models.decoder.decoder import Decoder
from models.prompt import Prompt
from models.search import OWN_SEARCH, Search
from pipelines.scoring.dense import DecoderScorer
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine

_WIDTH = 64
_MAX_WAITING = 128


class BeamScorer:
    """Scores histories by the items that beam search finds. Reads the decoder's weights once, when it is made."""

    def __init__(
        self,
        decoder: Decoder,
        catalogue: Catalogue,
        prompt: Prompt,
        width: int | None = None,
        search: Search = OWN_SEARCH,
    ) -> None:
        config = EngineConfig(max_waiting=_MAX_WAITING, uses_graphs=False, is_asynchronous=False)
        self._engine = Engine(decoder, config, items=ItemCodes.of(catalogue, search), bundle_version="offline")
        self._catalogue, self._prompt = catalogue, prompt
        self._width = width or search.beam_width or _WIDTH
        self._most = min(len(catalogue.item_ids), config.max_beam_rows)

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories of item indices -> (B, V) float32: log-probabilities, -inf where no beam is.

        Seen items take no place of others.
        """
        widths = [self._width + len(np.unique(history)) for history in histories]
        scores_BV = np.full((len(histories), len(self._catalogue.item_ids)), -np.inf, dtype=np.float32)
        for row, items, scores in self.lists(histories, [()] * len(histories), widths):
            scores_BV[row, items] = scores
        return scores_BV

    def lists(
        self,
        histories: Sequence[np.ndarray],
        excluded: Sequence[Sequence[int] | np.ndarray],
        widths: Sequence[int],
        num_items: int = 0,
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (number of the history, items best first, log-probabilities) of all histories, in any order.

        `num_items`, if above the width, lists more items than beams, for codes that items share.
        """
        waiting, in_flight = 0, 0
        while waiting < len(histories) or in_flight:
            while waiting < len(histories) and in_flight < _MAX_WAITING:
                history, width = histories[waiting].tolist(), min(widths[waiting], self._most)
                prompt = self._prompt.tokens(self._catalogue, history)
                k = max(width, num_items)
                self._engine.add_rank(str(waiting), prompt, k=k, excluded=excluded[waiting], beam_width=width)
                waiting, in_flight = waiting + 1, in_flight + 1
            for outcome in self._engine.step(0.0):
                in_flight -= 1
                yield int(outcome.request_id), outcome.item_indices, outcome.scores


def decoder_scorer(
    decoder: Decoder, catalogue: Catalogue, prompt: Prompt, search: Search = OWN_SEARCH
) -> DecoderScorer | BeamScorer:
    """Return what scores histories with this decoder: densely where only an item's one token scores, else by beams."""
    decoder.eval()
    if catalogue.depth == 1 and search.scores == "catalogue":
        return DecoderScorer(decoder, catalogue, prompt)
    return BeamScorer(decoder, catalogue, prompt, search=search)
