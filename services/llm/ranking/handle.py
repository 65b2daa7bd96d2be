"""The gateway's client of the LLM: one call with a timeout, and Ray's failures as this project's errors.

It imports neither torch nor the deployment. A request names the replicas that it may go to, in order; without names, the
affinity router sends requests of one user to one replica, which has the user's context in its prefix cache.
"""

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from services.contracts.rank import RankRequest, RankResult
from services.errors import DeadlineExceeded, DependencyAway, Overloaded
from services.llm.serving.replica_names import running
from services.llm.serving.reply import LLM, Refusal

_RETRY_AFTER_S = 1.0


class LlmHandle:
    """Calls the replicas behind a Ray Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._rank = handle.options(method_name="rank")
        self._deployment = str(handle.deployment_id)

    def replicas(self) -> tuple[str, ...]:
        """Return the names of the running replicas; empty while none is known."""
        return running(self._deployment)

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank, waiting `timeout_s` at most; a wait that ends early cancels the work on the replica.

        Raises Overloaded, DeadlineExceeded, DependencyAway, BundleMismatch, BundleNotFound or InvalidRequest.
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
            raise DependencyAway(LLM, _RETRY_AFTER_S) from error
        if isinstance(reply, Refusal):
            raise reply.as_error()
        result: RankResult = reply
        return result
