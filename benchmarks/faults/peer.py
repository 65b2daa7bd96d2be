"""A server that ranks and writes for a stack, as a process of its own, and a probe of the text that comes from it.

    python -m benchmarks.faults.peer PORT ITEM...

It speaks vLLM-GR's `/v1/recommendations` and OpenAI's `/v1/chat/completions` with streaming, and computes nothing: a
user's list is the given items from a place of the user's, a text is one sentence.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.load.clients import RestClient
from services.errors import EnvironmentFault

_HOST, _MODEL = "127.0.0.1", "text"
_WORDS = ("You ", "will ", "like ", "these.")
_START_S, _EVERY_S, _DEADLINE_MS = 30.0, 0.5, 1_000


class PeerProcess:
    """The server's process."""

    def __init__(self, port: int, item_ids: Sequence[str]) -> None:
        self._health = f"http://{_HOST}:{port}/health"
        self._command = [sys.executable, "-m", "benchmarks.faults.peer", str(port), *item_ids]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers. Raises EnvironmentFault."""
        self._process = subprocess.Popen(self._command)
        give_up_s = time.monotonic() + _START_S
        while time.monotonic() < give_up_s:
            with suppress(httpx.HTTPError):
                if httpx.get(self._health, timeout=1.0, trust_env=False).is_success:
                    return
            time.sleep(0.1)
        raise EnvironmentFault("the peer did not start")

    def kill(self) -> None:
        """Kill it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """Freeze it: its connections stay open, and it does not answer."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume it."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        psutil.Process(self._process.pid).send_signal(number)


@dataclass(slots=True)
class TextProbe:
    """Asks for a list with a rationale every half second, and keeps (second, outcome, whether in time, whether a list).

    Args:
        rest: Client whose key may ask for text.
        ask: Fields of the request.
    """

    rest: RestClient
    ask: dict[str, Any]
    answers: list[tuple[float, str, bool, bool]] = field(default_factory=list)

    async def run(self, began_s: float) -> None:
        """Ask until cancelled."""
        body = json.dumps(self.ask | {"rationale": True, "deadline_ms": _DEADLINE_MS}).encode()
        async with self.rest:
            while True:
                asked_s = time.perf_counter()
                status, answer = await self.rest.call(b"POST", b"/v1/recommendations", body)
                read = json.loads(answer) if status == httpx.codes.OK else {}
                in_time = time.perf_counter() - asked_s < _DEADLINE_MS / 1_000
                outcome = read.get("rationale_reason") or str(status)
                self.answers.append((asked_s - began_s, outcome, in_time, bool(read.get("items"))))
                await asyncio.sleep(max(0.0, asked_s + _EVERY_S - time.perf_counter()))

    def result(self, back_s: float) -> dict[str, Any]:
        """Return counts by outcome, and the seconds from the server's return to the next text."""
        outcomes = [outcome for _, outcome, _, _ in self.answers]
        written = [at_s for at_s, outcome, _, _ in self.answers if outcome == "written" and at_s >= back_s]
        return {
            "asked": len(self.answers),
            "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
            "lists": sum(has_list for *_, has_list in self.answers),
            "in_time": sum(in_time for _, _, in_time, _ in self.answers),
            "recovered_s": round(written[0] - back_s, 2) if written else None,
        }


def app_of(item_ids: Sequence[str]) -> Starlette:
    """Return the server's application."""

    async def recommend(request: Request) -> Response:
        body = await request.json()
        first = zlib.crc32(body["user_id"].encode()) % len(item_ids)
        ranked = [*item_ids[first:], *item_ids[:first]][: body["top_k"]]
        scored = [{"item_id": item_id, "score": -float(position)} for position, item_id in enumerate(ranked)]
        return JSONResponse({"recommendations": scored})

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": _MODEL, "object": "model", "max_model_len": 4_096}]})

    async def chat(_: Request) -> Response:
        return StreamingResponse(_chunks(), media_type="text/event-stream")

    async def health(_: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/recommendations", recommend, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/health", health),
        ]
    )


async def _chunks() -> AsyncIterator[str]:
    """Yield a sentence, its end and its usage as server-sent events."""
    for word in _WORDS:
        yield _event(choices=[{"index": 0, "delta": {"content": word}, "finish_reason": None}])
    yield _event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    yield _event(choices=[], usage={"prompt_tokens": 8, "completion_tokens": len(_WORDS), "total_tokens": 12})
    yield "data: [DONE]\n\n"


def _event(**fields: Any) -> str:
    return f"data: {json.dumps({'id': 'peer', 'object': 'chat.completion.chunk', 'model': _MODEL, **fields})}\n\n"


if __name__ == "__main__":
    uvicorn.run(app_of(sys.argv[2:]), host=_HOST, port=int(sys.argv[1]), log_level="critical")
