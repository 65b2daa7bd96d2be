"""Options of a pipeline run on codes or a decoder from elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from models.search import Scores
from services.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOptions:
    """What replaces a run's own codes and decoder.

    Args:
        decoder: Name of an import (`tailrace import model`), used instead of training a decoder; empty: none.
        index: Index of SIDs without a model; our decoder learns on these codes.
        distil_positions: History positions, newest first, at which an imported decoder gives the student its targets.
    """

    decoder: str = ""
    index: Path | None = None
    distil_positions: int = 10_000

    def __post_init__(self) -> None:
        """Reject options that exclude each other. Raises ConfigError naming the option."""
        if self.decoder and self.index is not None:
            raise ConfigError("--index: the import of --decoder has its own index; give one of them")
        if self.distil_positions < 1:
            raise ConfigError(f"--distil-positions: {self.distil_positions} is out of range; give 1 or more")

    def check_training(self, *, warm_start: bool, code_depth: int | None) -> None:
        """Reject options of a training that does not run. Raises ConfigError naming the option."""
        if not (self.decoder or self.index):
            return
        option = "--decoder" if self.decoder else "--index"
        if code_depth is not None:
            raise ConfigError(f"--code-depth: {option} has its own codes; remove one of them")
        if warm_start:
            raise ConfigError(
                f"--warm-start: not with {option}, whose codes replace the live bundle's; remove one of them"
            )


def parse_scores(given: str | None) -> Scores | None:
    """Return the kind of scores. Raises ConfigError."""
    for scores in get_args(Scores):
        if given == scores:
            return cast("Scores", scores)
    if given is None:
        return None
    raise ConfigError(f"--scores: {given!r} is not known; give {' or '.join(get_args(Scores))}")
