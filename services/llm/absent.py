"""The LLM and the writer of text where there are none: both say that they are away. For the standby, which runs beside Ray."""

from collections.abc import AsyncIterator

from services.contracts.rank import RankRequest, RankResult
from services.contracts.text import TextEvent, TextModel, TextRequest
from services.errors import DependencyAway

RETRY_AFTER_S = 5.0


class AbsentLlm:
    """Ranks nothing."""

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Raise DependencyAway."""
        raise DependencyAway("llm", RETRY_AFTER_S)


class AbsentText:
    """Writes nothing."""

    async def models(self) -> tuple[TextModel, ...]:
        """Raise DependencyAway."""
        raise DependencyAway("text", RETRY_AFTER_S)

    def write(self, request: TextRequest) -> AsyncIterator[TextEvent]:
        """Raise DependencyAway."""
        raise DependencyAway("text", RETRY_AFTER_S)
