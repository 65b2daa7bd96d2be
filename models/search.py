"""How a bundle's decoder is searched: beam width, scores and closing tokens. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_BEAM_WIDTH = 65_536
MAX_CLOSING_TOKENS = 16
Scores = Literal["catalogue", "vocabulary"]
"""Log-probabilities among the codes that continue a prefix in the catalogue, or among all tokens of the decoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The search of one bundle.

    Args:
        beam_width: Beams of a request; None: the engine's default.
        scores: The tokens among which log-probabilities are normalised.
        close: Tokens that the decoder generates after each code, such as a newline and the end of text.
        popular_first: Whether items of equal score are ordered by popularity, otherwise by index.
    """

    beam_width: int | None = None
    scores: Scores = "catalogue"
    close: tuple[int, ...] = ()
    popular_first: bool = False

    def record(self) -> dict[str, Any]:
        """Return the manifest's value (JSON)."""
        return {
            "beam_width": self.beam_width,
            "scores": self.scores,
            "close": list(self.close),
            "popular_first": self.popular_first,
        }


OWN_SEARCH = Search()
"""The search of a decoder that our pipeline trained."""


def search_of(manifest: Mapping[str, Any]) -> Search:
    """Return a bundle's search; our own decoder's if the manifest has none."""
    given = manifest.get("search")
    if given is None:
        return OWN_SEARCH
    return Search(
        beam_width=given.get("beam_width"),
        scores=given.get("scores", "catalogue"),
        close=tuple(given.get("close", ())),
        popular_first=bool(given.get("popular_first", False)),
    )
