"""The shapes of captured steps, and the split of a plan into them. Pure: no tensors.

Captured are text decode of B requests, all beam levels of R requests with W beams each, and a few short prompts of T
tokens together; B, R, W and T are rounded up to the captured sizes. Longer prompts run eagerly: launching them costs
less than running them.
"""

from collections import defaultdict
from dataclasses import dataclass

from services.llm.engine.beam.item_mask import RankWork
from services.llm.engine.config import EngineConfig
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sequence import Sequence

MAX_PROMPTS = 4
_PROMPT_SIZES = (16, 64, 256, 512)
_MIN_BEAMS = 8


@dataclass(frozen=True, slots=True, order=True)
class TextShape:
    """One token of text decode for up to this many requests."""

    num_requests: int


@dataclass(frozen=True, slots=True, order=True)
class BeamShape:
    """The selection of all levels but the first for up to `num_requests` requests.

    Each request has up to `num_beams` beams before and after each level.
    """

    num_requests: int
    num_beams: int

    @property
    def num_rows(self) -> int:
        """Rows of one level."""
        return self.num_requests * self.num_beams


@dataclass(frozen=True, slots=True, order=True)
class PromptShape:
    """The tokens of up to `MAX_PROMPTS` prompts, at most `num_rows` together."""

    num_rows: int


GraphShape = TextShape | BeamShape | PromptShape


@dataclass(frozen=True, slots=True)
class GraphGroup:
    """Requests that run as one captured shape."""

    shape: GraphShape
    sequences: list[Sequence]


class GraphShapes:
    """The shapes for one configuration and one depth of codes (0 without a catalogue)."""

    def __init__(self, config: EngineConfig, depth: int) -> None:
        self._text_sizes = sizes_up_to(min(config.max_running, config.max_num_batched_tokens))
        self._beam_sizes = [size for size in sizes_up_to(config.max_beam_rows) if size >= _MIN_BEAMS] or [
            config.max_beam_rows
        ]
        self._request_sizes = {
            beams: sizes_up_to(max(1, min(config.max_running, config.max_beam_rows // beams)))
            for beams in self._beam_sizes
        }
        self._prompt_sizes = [size for size in _PROMPT_SIZES if size <= config.max_num_batched_tokens]
        self._depth = depth

    def all(self) -> list[GraphShape]:
        """Return every shape, largest first, so that the smaller shapes reuse its memory."""
        texts: list[GraphShape] = [TextShape(size) for size in self._text_sizes]
        beams = [
            BeamShape(requests, beams)
            for beams in (self._beam_sizes if self._depth > 1 else ())
            for requests in self._request_sizes[beams]
        ]
        prompts = [PromptShape(size) for size in reversed(self._prompt_sizes)]
        return [*sorted(beams, key=lambda shape: -shape.num_rows), *prompts, *reversed(texts)]

    def of_prompts(self, rest: StepPlan) -> PromptShape | None:
        """Return the shape of the rest of a plan; None if none fits: too many tokens or prompts, beams or adapters."""
        if (
            rest.beam_steps
            or any(chunk.sequence.adapter for chunk in rest.chunks)
            or not 0 < len(rest.chunks) <= MAX_PROMPTS
        ):
            return None
        return next((PromptShape(size) for size in self._prompt_sizes if size >= rest.num_batched_tokens), None)

    def cut(self, plan: StepPlan) -> tuple[StepPlan, list[GraphGroup]]:
        """Split a plan into the rest, which runs eagerly, and groups of captured shapes.

        Requests with an adapter are in the rest: the captured shapes are the base's.
        """
        rest = StepPlan([chunk for chunk in plan.chunks if not _is_captured(chunk)], late=plan.late)
        texts = [chunk.sequence for chunk in plan.chunks if _is_captured(chunk)]
        by_width: dict[int, list[Sequence]] = defaultdict(list)
        for sequence in plan.beam_steps:
            widest = max(RankWork.of(sequence).width_by_level)
            if widest > self._beam_sizes[-1] or sequence.adapter:
                rest.beam_steps.append(sequence)
            else:
                by_width[_round_up(widest, self._beam_sizes)].append(sequence)
        groups = self._text_groups(texts)
        for beams, members in by_width.items():
            groups += self._beam_groups(beams, members)
        return rest, groups

    def _text_groups(self, sequences: list[Sequence]) -> list[GraphGroup]:
        sizes = self._text_sizes
        return [GraphGroup(TextShape(_round_up(len(batch), sizes)), batch) for batch in _batches(sequences, sizes[-1])]

    def _beam_groups(self, beams: int, sequences: list[Sequence]) -> list[GraphGroup]:
        sizes = self._request_sizes[beams]
        return [
            GraphGroup(BeamShape(_round_up(len(batch), sizes), beams), batch)
            for batch in _batches(sequences, sizes[-1])
        ]


def is_text_decode(chunk: Chunk) -> bool:
    """Whether a chunk is the last generated token of a text."""
    return chunk.num_tokens == 1 and chunk.is_last and chunk.sequence.num_new_tokens > 0


def _is_captured(chunk: Chunk) -> bool:
    return is_text_decode(chunk) and not chunk.sequence.adapter


def sizes_up_to(largest: int) -> list[int]:
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]


def _round_up(count: int, sizes: list[int]) -> int:
    return next(size for size in sizes if size >= count)


def _batches(sequences: list[Sequence], longest: int) -> list[list[Sequence]]:
    return [sequences[start : start + longest] for start in range(0, len(sequences), longest)]
