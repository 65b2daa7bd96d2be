"""The gateway's clients of the two deployments: calls over Ray Serve handles, with timeouts and error translation.

A ranking names candidate replicas in order; without names, the affinity router sends requests of one user to the same
replica, which has the user's context in its prefix cache. Texts with the same beginning carry the same session id for
the same reason. Ray's failures become this project's errors. The module imports neither torch nor the deployments.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from services.contracts.rank import RankRequest, RankResult
from services.contracts.text import TextBegan, TextDone, TextEvent, TextModel, TextRequest
from services.errors import DeadlineExceeded, DependencyUnavailable, Overloaded
from services.llm.serving.replica_names import running
from services.llm.serving.reply import LLM, TEXT, Refusal

_RETRY_AFTER_S = 1.0
_MODELS_TIMEOUT_S = 5.0
_GRACE_S = 2.0
"""The replica ends a text at its deadline; its last message may take this much longer."""
_MAX_TRIES = 3
_MAX_CHARACTERS = 256
_MAX_TOKENS = 64
"""Characters or tokens of a prompt that identify its session."""


class LlmHandle:
    """Calls the LLM's replicas."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._rank = handle.options(method_name="rank")
        self._deployment = str(handle.deployment_id)

    def replicas(self) -> tuple[str, ...]:
        """Return the names of the running replicas; empty until the first is known."""
        return running(self._deployment)

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank, waiting at most `timeout_s`; a wait that ends early cancels the work on the replica.

        Raises Overloaded, DeadlineExceeded, DependencyUnavailable, BundleMismatch, BundleNotFound or InvalidRequest.
        """
        sticky = self._rank if request.user_id is None else self._rank.options(session_id=request.user_id)
        response = sticky.remote(request)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await response
        except TimeoutError as error:
            response.cancel()  # type: ignore[no-untyped-call]
            raise DeadlineExceeded("llm") from error
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        except BackPressureError as error:
            raise Overloaded(LLM, _RETRY_AFTER_S) from error
        except (RayError, RayServeException) as error:
            raise DependencyUnavailable(LLM, _RETRY_AFTER_S) from error
        if isinstance(reply, Refusal):
            raise reply.as_error()
        result: RankResult = reply
        return result


class TextHandle:
    """A `TextWriter` that calls the text deployment's replicas."""

    def __init__(self, handle: DeploymentHandle[Any], default_deadline_s: float) -> None:
        self._models = handle.options(method_name="models")
        self._write = handle.options(method_name="write", stream=True)
        self._default_deadline_s = default_deadline_s

    async def models(self) -> tuple[TextModel, ...]:
        """Return the available models. Raises DependencyUnavailable."""
        try:
            async with asyncio.timeout(_MODELS_TIMEOUT_S):
                models: tuple[TextModel, ...] = await self._models.remote()
        except (TimeoutError, RayError, RayServeException) as error:
            raise DependencyUnavailable(TEXT, _RETRY_AFTER_S) from error
        return models

    async def write(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Yield a text's events; closing the iterator cancels the request.

        If a replica dies before any text, another is tried.
        Raises InvalidRequest, NotFound, Overloaded, DeadlineExceeded or DependencyUnavailable.
        """
        until_s = self._until_s(request)
        sticky = self._write.options(session_id=session_of(request))
        has_begun, has_text = False, False
        for num_tries_left in reversed(range(_MAX_TRIES)):
            try:
                async with aclosing(_events(sticky.remote(request, self._budget_s(until_s)), until_s)) as events:
                    async for event in events:
                        is_beginning = isinstance(event, TextBegan)
                        if not (is_beginning and has_begun):
                            yield event
                        has_begun, has_text = True, has_text or not is_beginning
            except RayActorError as error:
                if has_text or not num_tries_left:
                    raise DependencyUnavailable(TEXT, _RETRY_AFTER_S) from error
            else:
                return

    def _until_s(self, request: TextRequest) -> float:
        """Return the end of the wait on the event loop's clock."""
        left_s = self._default_deadline_s
        if request.deadline_unix_s is not None:
            left_s = request.deadline_unix_s - time.time()
        return asyncio.get_running_loop().time() + left_s + _GRACE_S

    def _budget_s(self, until_s: float) -> float:
        """Return the remaining time for a replica, which counts it on its own clock: hosts' wall clocks differ."""
        return until_s - _GRACE_S - asyncio.get_running_loop().time()


async def _events(response: Any, until_s: float) -> AsyncGenerator[TextEvent, None]:
    """Yield a replica's events; closing the iterator cancels the call.

    Raises RayActorError when the replica died or cannot be reached.
    """
    is_over = False
    try:
        while not is_over:
            async with asyncio.timeout_at(until_s):
                events = await anext(response, None)
            if isinstance(events, Refusal):
                is_over = True
                raise events.as_error(TEXT)
            is_over = events is None or isinstance(events[-1], TextDone)
            for event in events or ():
                yield event
    except TimeoutError as error:
        raise DeadlineExceeded("text") from error
    except BackPressureError as error:
        is_over = True
        raise Overloaded(TEXT, _RETRY_AFTER_S) from error
    except RayActorError:
        is_over = True
        raise
    except (RayError, RayServeException) as error:
        is_over = True
        raise DependencyUnavailable(TEXT, _RETRY_AFTER_S) from error
    finally:
        if not is_over:
            response.cancel()


def session_of(request: TextRequest) -> str:
    """Return the session id of a request: equal for requests that share a cached beginning.

    Requests with equal ids should meet on one replica. A conversation is identified by everything up to its first user
    message, which all its later requests repeat; a prompt by its first characters or tokens. So a conversation stays on
    one replica, and conversations that share only a system message may be separated.
    """
    digest = hashlib.blake2b(request.cache_scope, digest_size=16)
    for part in _beginning(request):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _beginning(request: TextRequest) -> Iterator[str]:
    for message in request.messages:
        yield message.role
        yield message.content
        if message.role == "user":
            return
    if isinstance(request.prompt, str):
        yield request.prompt[:_MAX_CHARACTERS]
    elif request.prompt is not None:
        yield from map(str, request.prompt[:_MAX_TOKENS])
