"""What a text request asks of the choice of its tokens, and what it gets. The names and their meaning are vLLM's and OpenAI's. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.errors import InvalidRequest

MAX_LOGPROBS = 20
_MAX_SEED = 2**64 - 1
_MAX_TOP_K = 2**31 - 1
_MAX_FACTOR = 1e30
"""Of temperature, repetition penalty and bias: the numbers are multiplied in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """One request's settings. Temperature 0 is greedy: the most probable token, the smaller id on ties.

    `top_k` 0 means all. Penalties count what was generated, `repetition_penalty` the prompt too. `logit_bias` maps token id
    to what is added. `num_logprobs` is how many of the most probable tokens are told beside the chosen one; None: not even
    that one's logprob.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is out of range. Raises InvalidRequest naming the field."""
        for name, is_right, fix in (
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
            if not is_right:
                raise InvalidRequest(name, f"{getattr(self, name)} is out of range", f"send {fix}")

    @property
    def changes_logits(self) -> bool:
        """Whether anything is done to the logits before temperature."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)

    @property
    def cuts_tail(self) -> bool:
        """Whether improbable tokens are left out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Chosen:
    """The next token, and where asked for its natural logprob and the most probable tokens with theirs, best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
