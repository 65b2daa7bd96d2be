"""The sampling parameters of a text request and the sampled token.

Names and meaning follow vLLM and OpenAI. No torch.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.contracts.text import SamplingOptions
from services.errors import InvalidRequest

MAX_LOGPROBS = 20
_MAX_SEED = 2**64 - 1
_MAX_TOP_K = 2**31 - 1
_MAX_FACTOR = 1e30
"""Maximum temperature, repetition penalty and bias: products must stay finite in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingOptions):
    """The checked options of one choice. Temperature 0 is greedy: the most probable token, the smaller id on ties.

    `top_k` 0 means all. Penalties count generated tokens, `repetition_penalty` also the prompt's tokens. `logit_bias`
    maps a token id to the number added to its logit. `num_logprobs` is the number of most probable tokens returned with
    their logprobs in addition to the sampled token's; None returns no logprobs.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check all ranges. Raises InvalidRequest naming the field."""
        for name, is_valid, fix in (
            ("temperature", 0 <= self.temperature <= _MAX_FACTOR, f"0 to {_MAX_FACTOR:g}"),
            ("top_k", 0 <= self.top_k <= _MAX_TOP_K, f"0 for all, or at most {_MAX_TOP_K}"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty <= _MAX_FACTOR,
                f"a positive number, at most {_MAX_FACTOR:g}",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2"),
            (
                "logit_bias",
                all(abs(bias) <= _MAX_FACTOR for bias in self.logit_bias.values()),
                f"-{_MAX_FACTOR:g} to {_MAX_FACTOR:g}",
            ),
            ("seed", 0 <= self.seed <= _MAX_SEED, f"0 to {_MAX_SEED}"),
            ("num_logprobs", 0 <= (self.num_logprobs or 0) <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        ):
            if not is_valid:
                raise InvalidRequest(name, f"{getattr(self, name)} is out of range", f"send {fix}")

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases change the logits before the temperature."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token and, if requested, its natural logprob and the most probable tokens with theirs, best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class TokenMask(Protocol):
    """The allowed next tokens of a text that must follow a grammar. Called only by the engine's thread."""

    failure: str | None
    """The reason why the grammar cannot continue: the text ends before the next token."""

    def allowed(self) -> np.ndarray:
        """Return (ceil(V / 32),) int32: token t is allowed if bit t % 32 of word t // 32 is set. Never all zero."""
        ...

    def take(self, token_id: int) -> None:
        """Advance by an allowed token. Called once for each sampled token, including the last."""
        ...

    def fork(self) -> "TokenMask":
        """Return an independent mask at the same position, to look ahead."""
        ...
