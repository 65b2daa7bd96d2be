"""The stack under test: the running stack, or a stack of these settings for the benchmark's duration (`--up`)."""

import argparse
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from benchmarks.load.audience import Audience, find_audience
from benchmarks.load.clients import RestClient
from benchmarks.load.command import host_and_port
from services.settings.settings import Settings

SETTLE_S = 75.0
"""Ray Serve is busy for a minute after its start."""


def add_stack_options(parser: argparse.ArgumentParser, settings: Settings) -> None:
    """Add `--url` and `--grpc`, the addresses to call, and `--up`."""
    default_url = f"{settings.http_host}:{settings.http_port}"
    parser.add_argument("--url", type=host_and_port, default=default_url, metavar="HOST:PORT")
    parser.add_argument("--grpc", default=settings.grpc_address, metavar="HOST:PORT")
    parser.add_argument("--up", action="store_true", help="start a stack for the run and stop it afterwards")


def parse_for_stack(parser: argparse.ArgumentParser, settings: Settings) -> argparse.Namespace:
    """Return the parsed options of a benchmark that calls a stack."""
    add_stack_options(parser, settings)
    return parser.parse_args()


@contextmanager
def stack_for(settings: Settings, *, is_started: bool, settle_s: float = 0.0) -> Iterator[None]:
    """Start a stack if `is_started`, and stop it at the end, also at SIGTERM; otherwise use the running one.

    A started stack gets `settle_s` without requests, because its start would count as use at rest.
    """
    if not is_started:
        yield
        return
    from infra.local.commands.down import stop_stack
    from infra.local.commands.up import spawn_stack, until_ready

    early: list[int] = []
    _at_stop(early.append)  # an exit now would leave the stack behind
    child = spawn_stack(settings, ("infra.cli.main", "up"))
    try:
        _at_stop(lambda _number: sys.exit("stopped"))
        if early:
            sys.exit("stopped")
        until_ready(settings, child, sys.stderr)
        time.sleep(settle_s)
        yield
    finally:
        stop_stack(settings)


def _at_stop(act: Callable[[int], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: act(received))


@asynccontextmanager
async def ready_stack(address: tuple[str, int]) -> AsyncIterator[tuple[RestClient, Audience]]:
    """Yield a caller of the ready stack at this address, and its users and items. Exits with the fix if not ready."""
    async with RestClient(*address) as rest:
        await require_ready(rest)
        yield rest, await find_audience(rest)


async def require_ready(rest: RestClient) -> None:
    """Check that a stack answers this caller. Exits with the fix if it is not ready or requires another key."""
    if (await rest.call(b"GET", b"/readyz", b""))[0] != 200:
        sys.exit(f"error: no stack is ready at {rest.address}; run `tailrace up` first")
    status, _ = await rest.call(b"POST", b"/v1/recommendations", b'{"k": 1}')
    if status in {401, 403}:
        sys.exit(f"error: {rest.address} answers {status}: it requires an API key")
