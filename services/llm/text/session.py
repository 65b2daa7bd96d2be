"""Which requests should meet in one replica: those that begin alike, because that replica has their beginning cached. Pure.

A conversation is known by all up to its first user's turn, which every later turn repeats; a prompt by its first characters or
tokens. So one conversation stays together, and conversations that share no more than a system message may part.
"""

import hashlib
from collections.abc import Iterator

from services.contracts.text import TextRequest

_MAX_CHARACTERS = 256
_MAX_TOKENS = 64


def session_of(request: TextRequest) -> str:
    """Return the name under which the request is routed."""
    begun = hashlib.blake2b(digest_size=16)
    for part in _beginning(request):
        begun.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return begun.hexdigest()


def _beginning(request: TextRequest) -> Iterator[str]:
    for turn in request.messages:
        yield turn.role
        yield turn.content
        if turn.role == "user":
            return
    if isinstance(request.prompt, str):
        yield request.prompt[:_MAX_CHARACTERS]
    elif request.prompt is not None:
        yield from map(str, request.prompt[:_MAX_TOKENS])
