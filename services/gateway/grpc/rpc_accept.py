"""Takes in several gRPC calls at a time, where grpc.aio takes one.

`grpc.aio` keeps one accept armed for each method, and needs four turns of the event loop to arm the next. A loop that HTTP
requests keep busy has long turns: the gRPC door then takes in fewer calls than come, and they are late before anyone has seen
them, while the REST door beside it is quick. What it takes in is all it is ready for, so each method is given to it under
several names, all of which wait for calls of the one real method. This leans on two methods inside grpc's extension module;
`tests/unit/gateway/test_rpc_accept.py` fails if an upgrade changes them.
"""

import importlib
import secrets
from typing import Any

cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")  # an extension, which no stubs describe
_NUM_ARMED = 8
_MARK = f"/{secrets.token_hex(16)}/"
"""Parts a further name from its number. Nobody knows it, so nobody can call by such a name, which would never be answered."""


class _WideServer(cygrpc.AioServer):  # type: ignore[misc]
    """grpc's own server with `_NUM_ARMED` accepts for each registered method."""

    def add_registered_method_handlers(self, method_handlers: dict[str, Any]) -> None:
        """Register each handler under its method's name and its further ones."""
        names = ((method, _further_names(method)) for method in method_handlers)
        super().add_registered_method_handlers(
            {name: method_handlers[method] for method, further in names for name in (method, *further)}
        )

    async def _request_registered_call(self, method: bytes) -> Any:
        """Wait for a call of the real method, whichever of its names is given."""
        return await super()._request_registered_call(method.split(_MARK.encode())[0])


def _further_names(method: str) -> list[str]:
    return [f"{method}{_MARK}{number}" for number in range(1, _NUM_ARMED)]


def accept_widely() -> None:
    """Let every `grpc.aio` server that this process makes from now on take in several calls at a time."""
    cygrpc.AioServer = _WideServer
