"""The two ways to ask for text: how each is read and told, and who writes. Knows no HTTP."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.errors import NotFound
from services.gateway.data_plane import DataPlane
from services.gateway.openai.answers import ChatShape, CompletionShape, Head, Shape
from services.gateway.openai.call import RECOMMENDER, Asking, CompletionCall
from services.gateway.openai.generate import Write
from services.gateway.openai.parse import parse_chat, parse_completion
from services.gateway.openai.ranked import RankedChoices
from services.gateway.text.metrics import CHAT, COMPLETIONS

Parse = Callable[[bytes, Asking], CompletionCall]


@dataclass(frozen=True, slots=True)
class Route:
    """One way to ask for text. `name` is what metrics call it."""

    name: str
    path: str
    parse: Parse
    shape: Callable[[Head, CompletionCall], Shape]


ROUTES = {
    COMPLETIONS: Route(COMPLETIONS, "/v1/completions", parse_completion, lambda h, a: CompletionShape(h, _echoes(a))),
    CHAT: Route(CHAT, "/v1/chat/completions", parse_chat, lambda head, _: ChatShape(head)),
}


def head_of(asked: CompletionCall, request_id: str) -> Head:
    """Return what every chunk of the answer says."""
    return Head(
        request_id=request_id,
        created_unix_s=int(time.time()),
        model=asked.model,
        num_logprobs=asked.requests[0].sampling.num_logprobs,
    )


def writer_of(plane: DataPlane, ranked: RankedChoices, asked: CompletionCall, route: str) -> Write:
    """Choose who writes. Raises NotFound, InvalidRequest for too many choices, or NotAllowed for the recommender."""
    if asked.model == RECOMMENDER:
        ranked.check()
        return ranked.write
    tier = plane.text
    if tier is None:
        raise NotFound(
            f"there is no model {asked.model!r:.80}", "no text is served here: start with --text or --text-url"
        )
    tier.check_fits(asked.num_choices, asked.requests[0].priority)
    return lambda request: tier.write(request, route)


def _echoes(asked: CompletionCall) -> dict[int, str]:
    return {index: echo for index in range(asked.num_choices) if (echo := _echo(asked, index))}


def _echo(asked: CompletionCall, index: int) -> str:
    return asked.echoes[index // asked.n] if asked.echoes else ""
