"""What the next token of a text is drawn for. No torch."""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from services.llm.engine.schedule.sequence import Sequence
from services.llm.engine.schedule.work import TextWork
from services.llm.engine.text.parameters import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """What is drawn for: the settings, all tokens so far, how many of them were the prompt, and the bits of what may come.

    `allowed` (ceil(V / 32),) int32 is a `TokenMask`'s, or None for everything.
    """

    sampling: Sampling
    tokens: Many[int]
    num_prompt_tokens: int
    allowed: np.ndarray | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether anything is done to the logits before temperature."""
        return self.allowed is not None or self.sampling.changes_logits

    @property
    def is_most_probable(self) -> bool:
        """Whether the most probable token is all that is wanted."""
        return not (self.changes_logits or self.sampling.temperature) and self.sampling.num_logprobs is None

    @classmethod
    def of(cls, sequence: Sequence) -> "Draw":
        """Return what a text's next token is drawn for."""
        assert isinstance(sequence.work, TextWork), "only text is sampled"
        mask = sequence.work.mask
        allowed = mask.allowed() if mask is not None else None
        return cls(sequence.work.sampling, sequence.tokens, sequence.num_prompt_tokens, allowed)
