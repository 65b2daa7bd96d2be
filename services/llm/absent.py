"""Stand-ins for the LLM and the text model in the standby gateway, which has neither: every call raises DependencyUnavailable."""

from collections.abc import AsyncIterator, Sequence

from services.contracts.rank import RankRequest, RankResult
from services.contracts.text import TextEvent, TextModel, TextRequest
from services.errors import DependencyUnavailable

RETRY_AFTER_S = 5.0


class AbsentLlm:
    """An LLM that is never available."""

    def replicas(self) -> Sequence[str]:
        """Return none."""
        return ()

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Raise DependencyUnavailable."""
        raise DependencyUnavailable("llm", RETRY_AFTER_S)


class AbsentText:
    """A text model that is never available."""

    async def models(self) -> tuple[TextModel, ...]:
        """Raise DependencyUnavailable."""
        raise DependencyUnavailable("text", RETRY_AFTER_S)

    def write(self, request: TextRequest) -> AsyncIterator[TextEvent]:
        """Raise DependencyUnavailable."""
        raise DependencyUnavailable("text", RETRY_AFTER_S)
