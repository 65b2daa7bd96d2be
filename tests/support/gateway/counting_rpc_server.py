"""Ray Serve's gRPC server or the standby's, without Ray.

`python -m tests.support.gateway.counting_rpc_server KIND PORT MAX_BYTES`. It answers every received message with
UNAUTHENTICATED and the message's length.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from infra.local.standby.__main__ import rpc_server
from services.app import GRPC_SERVICERS

KINDS = ("ray", "standby")


async def answer(request: bytes, context: Any) -> None:
    """Refuse, and return the number of received bytes."""
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"read {len(request)}")


class CountingDoor:
    """A servicer that answers every method this way."""

    Recommend = RecommendBatch = SimilarItems = Popular = Search = Assign = RecordEvents = Check = staticmethod(answer)
    EraseUser = GetErasure = PutItems = PatchItem = GetItem = DeleteItems = staticmethod(answer)


async def serve(kind: str, port: int, max_bytes: int) -> None:
    """Serve until killed; Ray's server reads its limit from the environment, as in a stack."""
    if kind == "standby":
        door: Any = CountingDoor()
        server = rpc_server(door, "127.0.0.1", port, max_bytes)
        await server.start()
        await server.wait_for_termination()
        return
    from ray.serve._private.grpc_util import start_grpc_server
    from ray.serve.config import gRPCOptions

    def handler_of(**_: object) -> Callable[[bytes, Any], Awaitable[None]]:
        return answer

    options = gRPCOptions(port=port, grpc_servicer_functions=list(GRPC_SERVICERS))
    termination, _ = await start_grpc_server(handler_of, options, event_loop=asyncio.get_running_loop())
    await termination


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
