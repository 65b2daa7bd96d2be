"""Recommendations as ranked choices: a history as prompt, the n best next items as the n choices of a completion.

    prompt "50 181 258" ─▶ the data plane's recommendation ─▶ choice i: text = item id, logprob = its score

Choices are best first. Sampling settings have no effect. Knows no JSON.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from services.contracts.access import Caller, Scope
from services.contracts.recommend import Recommendation, RecommendRequest
from services.contracts.text import FinishReason, TextBegan, TextDone, TextEvent, TextPiece, TextRequest, TokenLogprob
from services.errors import InvalidRequest, NotAllowed, as_tailrace_error
from services.gateway.call.headers import DEADLINE_MS
from services.gateway.data_plane import DataPlane
from services.gateway.openai.responder import DOOR
from services.router.deadline import Arrival

_FIELDS = {"k": "n", "recent_item_ids": "prompt", "deadline_ms": DEADLINE_MS}
"""A recommendation's fields and what they are called in a completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedChoices:
    """One call of one caller. `deadline_ms` is as sent; None: the default of recommendations."""

    plane: DataPlane
    request_id: str
    caller: Caller
    arrived_s: float
    deadline_ms: int | None

    def check_scope(self) -> None:
        """Refuse callers without the scope recommend. Raises NotAllowed."""
        if Scope.RECOMMEND not in self.caller.scopes:
            raise NotAllowed(Scope.RECOMMEND, self.caller.key_id)

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Recommend; see TextWriter. If there are fewer items than n, the last choices are empty."""
        try:
            history = _history(request)
            answer = await self._recommend(history, request.n)
        except Exception as error:
            failure = as_tailrace_error(error)
            self.plane.recommend_refused(DOOR, failure.kind.value, failure.summary, self.request_id)
            raise
        yield TextBegan(num_prompt_tokens=len(history))
        for index, item in enumerate(answer.items):
            yield _piece(index, item.item_id, item.score)
        for index in range(len(answer.items), request.n):
            yield TextPiece(index=index, text="", num_tokens=0, finish_reason=FinishReason.STOP)
        yield TextDone(num_prompt_tokens=len(history), num_cached_tokens=0, num_completion_tokens=len(answer.items))

    async def _recommend(self, history: tuple[str, ...], k: int) -> Recommendation:
        """Recommend under the caller's request id, by which `tailrace explain` finds it. Errors name the completion's fields."""
        try:
            request = RecommendRequest(
                request_id=self.request_id, recent_item_ids=history, k=k, deadline_ms=self.deadline_ms
            )
            return await self.plane.recommend(request, Arrival(self.arrived_s), DOOR, self.caller)
        except InvalidRequest as error:
            name, _, place = error.field.partition("[")
            problem = f"item [{place}: {error.problem}" if place else error.problem
            raise InvalidRequest(_FIELDS.get(name, error.field), problem, error.fix) from error


def _history(request: TextRequest) -> tuple[str, ...]:
    if not isinstance(request.prompt, str):
        raise InvalidRequest("prompt", "token ids mean nothing here", "send item ids with spaces between, oldest first")
    history = tuple(request.prompt.split())
    if not history:
        raise InvalidRequest("prompt", "empty", "send at least one item id")
    return history


def _piece(index: int, item_id: str, score: float) -> TextPiece:
    token = TokenLogprob(token=item_id, token_bytes=item_id.encode(), logprob=score)
    return TextPiece(index=index, text=item_id, num_tokens=1, logprobs=(token,), finish_reason=FinishReason.STOP)
