"""Which shapes of steps are recorded, and how a plan is cut into them. Pure: no tensors.

Text decode of B requests; and the beams of R requests that choose the same level, W beams each. B, R and W are rounded up
to the sizes that are recorded. What else a plan holds (prefill) runs as it comes.
"""

from collections import defaultdict
from dataclasses import dataclass

from services.llm.engine.config import EngineConfig
from services.llm.engine.schedule.plan import Chunk, StepPlan
from services.llm.engine.schedule.sequence import Sequence
from services.llm.engine.schedule.work import RankWork

_MIN_BEAMS = 8


@dataclass(frozen=True, slots=True, order=True)
class TextShape:
    """One token of text decode for up to so many requests."""

    num_requests: int


@dataclass(frozen=True, slots=True, order=True)
class BeamShape:
    """The choice of level `level` (1 on) for up to `num_requests` requests, up to `num_beams` beams each, before and after."""

    level: int
    num_requests: int
    num_beams: int

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return self.num_requests * self.num_beams


Shape = TextShape | BeamShape


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that run as one recorded shape."""

    shape: Shape
    sequences: list[Sequence]


class GraphShapes:
    """The shapes of one configuration and one depth of codes (0 without a catalogue)."""

    def __init__(self, config: EngineConfig, depth: int) -> None:
        self._text_sizes = sizes_up_to(min(config.max_running, config.max_step_tokens))
        self._beam_sizes = [size for size in sizes_up_to(config.max_beam_rows) if size >= _MIN_BEAMS] or [
            config.max_beam_rows
        ]
        self._request_sizes = {
            beams: sizes_up_to(max(1, min(config.max_running, config.max_beam_rows // beams)))
            for beams in self._beam_sizes
        }
        self._depth = depth

    def all(self) -> list[Shape]:
        """Return every shape, the largest first, so that the smaller ones fit into the memory of the first."""
        texts: list[Shape] = [TextShape(size) for size in self._text_sizes]
        beams = [
            BeamShape(level, requests, beams)
            for level in range(1, self._depth)
            for beams in self._beam_sizes
            for requests in self._request_sizes[beams]
        ]
        return [*sorted(beams, key=lambda shape: -shape.num_rows), *reversed(texts)]

    def cut(self, plan: StepPlan) -> tuple[StepPlan, list[Group]]:
        """Split a plan into groups of a recorded shape and what is left."""
        rest = StepPlan([chunk for chunk in plan.chunks if not is_text_decode(chunk)], late=plan.late)
        texts = [chunk.sequence for chunk in plan.chunks if is_text_decode(chunk)]
        by_kind: dict[tuple[int, int], list[Sequence]] = defaultdict(list)
        for sequence in plan.beam_steps:
            widest = _widest(sequence)
            if widest > self._beam_sizes[-1]:
                rest.beam_steps.append(sequence)
            else:
                by_kind[sequence.num_levels_done, _rounded(widest, self._beam_sizes)].append(sequence)
        groups = self._text_groups(texts)
        for (level, beams), members in by_kind.items():
            groups += self._beam_groups(level, beams, members)
        return rest, groups

    def _text_groups(self, sequences: list[Sequence]) -> list[Group]:
        sizes = self._text_sizes
        return [Group(TextShape(_rounded(len(run), sizes)), run) for run in _runs(sequences, sizes[-1])]

    def _beam_groups(self, level: int, beams: int, sequences: list[Sequence]) -> list[Group]:
        sizes = self._request_sizes[beams]
        return [Group(BeamShape(level, _rounded(len(run), sizes), beams), run) for run in _runs(sequences, sizes[-1])]


def is_text_decode(chunk: Chunk) -> bool:
    """Whether a chunk is the one token that a text generated last."""
    return chunk.num_tokens == 1 and chunk.is_last and chunk.sequence.num_new_tokens > 0


def sizes_up_to(largest: int) -> list[int]:
    """Give 1, 2, 4 and so on, and the largest."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def _widest(sequence: Sequence) -> int:
    assert isinstance(sequence.work, RankWork), "only rankings have beams"
    return max(sequence.num_beam_rows, sequence.work.width_by_level[sequence.num_levels_done])


def _rounded(count: int, sizes: list[int]) -> int:
    return next(size for size in sizes if size >= count)


def _runs(sequences: list[Sequence], longest: int) -> list[list[Sequence]]:
    return [sequences[start : start + longest] for start in range(0, len(sequences), longest)]
