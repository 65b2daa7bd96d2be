"""The standby: a gateway outside Ray, warm, that answers whenever Ray's HAProxy cannot. `python -m infra.local.standby.standby`.

    callers ──▶ port ─┬─ HAProxy ── gateways, LLM              in normal times
                      └─ relay ── data plane of this process   while HAProxy is away, or has no gateway

It shares both ports with HAProxy, so that it takes over before anybody has noticed; what has to be decided is when to hand
back. It has no LLM: stored lists, the student and popularity answer, under the same keys, limits and metrics.
"""

import asyncio
import gc
import signal
from contextlib import AsyncExitStack
from types import FrameType
from typing import NoReturn

from prometheus_client import REGISTRY

from infra.local.servers.ray_home import proxy_folder, ray_home
from infra.local.standby.doors import HandsBack, rest_server, rpc_server, unix_socket
from infra.local.standby.relay import Relay
from infra.local.standby.shared_port import SharedPort
from infra.local.standby.watch import StandbyWatch
from services.observability.metrics import StandbyMetrics, configure_logging
from services.settings.settings import Settings, load_settings


async def run(settings: Settings) -> None:
    """Stand by until SIGTERM. What listens is opened last, when everything behind it is warm."""
    from services.app import open_standby

    home, host = ray_home(settings.state_dir), settings.door_host
    rest_path, rpc_path = home / "rest.sock", home / "rpc.sock"
    async with AsyncExitStack() as closing:
        rest_app, rpc_door = await closing.enter_async_context(open_standby(settings))
        gc.collect()
        gc.freeze()
        rest_socket = closing.enter_context(unix_socket(rest_path))
        rpc = rpc_server(rpc_door, rpc_path)
        await rpc.start()
        closing.push_async_callback(rpc.stop, None)
        relays = (
            Relay(SharedPort(host, settings.door_http_port), rest_path),
            Relay(SharedPort(host, settings.door_grpc_port), rpc_path),
        )
        for relay in relays:
            await closing.enter_async_context(relay)
        watch = StandbyWatch(relays, proxy_folder(home), settings.standby_heartbeat, StandbyMetrics(REGISTRY))
        rest = rest_server(HandsBack(rest_app, lambda: watch.is_on_duty))
        watching = asyncio.create_task(watch.run())
        watching.add_done_callback(lambda _: setattr(rest, "should_exit", True))
        closing.callback(watching.cancel)
        await rest.serve(sockets=[rest_socket])
        if watching.done():
            watching.result()


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def main() -> None:
    """Read settings and stand by."""
    signal.signal(signal.SIGTERM, _leave)
    settings = load_settings()
    configure_logging(settings.log_level)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
