"""What a call asks for, read: one TextRequest per prompt, and how the caller wants it told. Values alone."""

from dataclasses import dataclass

from services.contracts.access import Caller
from services.contracts.text import TextRequest
from services.gateway.text.tier import TextLimits

RECOMMENDER = "tailrace-recommender"
"""The live bundle, under the name by which OpenAI clients ask it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What a call says beside its body. `deadline_unix_s` is when its text must be done."""

    request_id: str
    caller: Caller
    deadline_unix_s: float
    limits: TextLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """What is to be written, and how it is to be told. Choice c of prompt p has the index p * n + c."""

    requests: tuple[TextRequest, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echoes: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """Who is to write."""
        return self.requests[0].model

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.requests[0].n

    @property
    def num_choices(self) -> int:
        """Choices in all."""
        return self.n * len(self.requests)
