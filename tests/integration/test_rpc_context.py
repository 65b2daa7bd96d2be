"""The gRPC door against Ray Serve's own call context; no cluster is started."""

import pickle
from typing import Any

import grpc
import pytest

from services.contracts import recommend_pb2 as pb
from services.contracts.access import Scope
from services.gateway.access.authorize import OpenAccess
from services.gateway.grpc.answers import guarded

pytestmark = [
    pytest.mark.integration,
    # ray.serve uses a pydantic feature that its newest versions warn of
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


async def test_the_door_runs_under_ray_serves_context() -> None:
    """Ray Serve's context takes our codes, details and trailers, and pickles with them."""
    from ray.serve.grpc_util import RayServegRPCContext

    context = RayServegRPCContext(_GrpcContext())
    refused: list[str] = []

    async def work(_: object, headers: dict[str, str]) -> pb.RecommendResponse:
        """Fail with what the caller sent."""
        raise ValueError(headers["x-deadline-ms"])

    await guarded(
        context,
        work,
        pb.RecommendResponse(),
        lambda *refusal: refused.append(refusal[1]),
        access=OpenAccess(),
        scope=Scope.RECOMMEND,
    )

    back = pickle.loads(pickle.dumps(context))
    assert (back.code(), refused) == (grpc.StatusCode.INTERNAL, ["internal"])
    assert {key for key, _ in back.trailing_metadata()} == {"grpc-status-details-bin", "x-request-id"}


class _GrpcContext:
    """What Ray Serve reads of a grpc.aio context."""

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = {"invocation_metadata": (("x-deadline-ms", "7"),), "trailing_metadata": ()}
        return lambda: values.get(name)
