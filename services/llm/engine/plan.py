"""The plan of one step: decided by the scheduler, run by the runner."""

from dataclasses import dataclass, field, replace

import numpy as np

from services.llm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start to start+num_tokens of one sequence to compute.

    A prefill chunk, or the last token of a text and its drafts.
    """

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """The first position after the chunk."""
        return self.start + self.num_tokens

    @property
    def is_last(self) -> bool:
        """Whether the chunk reaches the sequence's end, so that its last hidden state selects the next token or level.

        Valid before the step has started.
        """
        return self.end >= self.sequence.num_tokens

    @property
    def num_outputs(self) -> int:
        """The chunk's last rows whose hidden states are read: of the sequence's last token and of each draft.

        Valid before the step has started.
        """
        return 1 + len(self.sequence.drafts) if self.is_last else 0

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute, drafts included."""
        return [*self.sequence.tokens[self.start : self.end], *self.sequence.drafts]


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of a step: tokens computed (without beam rows), requests, and beam rows."""

    num_batched_tokens: int
    num_requests: int
    num_beam_rows: int

    @property
    def num_rows(self) -> int:
        """Rows of the forward pass: tokens and beams."""
        return self.num_batched_tokens + self.num_beam_rows


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: chunks and beam steps, and the sequences that ended without running (their deadline passed)."""

    chunks: list[Chunk] = field(default_factory=list)
    beam_steps: list[Sequence] = field(default_factory=list)
    late: list[Sequence] = field(default_factory=list)

    def without_ended(self) -> "StepPlan":
        """Return the plan without sequences that ended after it was made, and after the drafts verified since."""
        return StepPlan(
            [
                replace(chunk, start=chunk.sequence.num_computed_tokens)
                for chunk in self.chunks
                if not chunk.sequence.has_ended
            ],
            [sequence for sequence in self.beam_steps if not sequence.has_ended],
        )

    @property
    def sequences(self) -> list[Sequence]:
        """The requests that the step works on, without duplicates."""
        return [*(chunk.sequence for chunk in self.chunks), *self.beam_steps]

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.beam_steps)

    @property
    def has_drafts(self) -> bool:
        """Whether a text has drafts to verify. Valid until the step is collected."""
        return any(chunk.sequence.drafts for chunk in self.chunks)

    @property
    def num_batched_tokens(self) -> int:
        """Tokens to compute, without beam rows."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def output_rows(self) -> np.ndarray:
        """The rows whose hidden states are read, ascending: rows of the chunks, then all beams at their level."""
        ends = np.cumsum([0, *(chunk.num_tokens for chunk in self.chunks)])
        num_rows = ends[-1] + sum(sequence.num_beam_rows for sequence in self.beam_steps)
        read = [np.arange(end - chunk.num_outputs, end) for chunk, end in zip(self.chunks, ends[1:], strict=True)]
        return np.concatenate([*read, np.arange(ends[-1], num_rows)])

    @property
    def num_requests(self) -> int:
        return len(self.chunks) + len(self.beam_steps)

    @property
    def num_beam_rows(self) -> int:
        """Beam rows to compute, of all levels. Valid before the step has started."""
        return sum(sum(sequence.next_beam_rows) for sequence in self.beam_steps)

    @property
    def size(self) -> StepSize:
        """Size of the step. Valid before the step has started."""
        return StepSize(self.num_batched_tokens, self.num_requests, self.num_beam_rows)
