"""Streamed completions: a minimal client (HTTP/1.1 and server-sent events by hand) and the figures of arrival times.

A wave is a number of concurrent texts, a stream the seconds from the request to each arrival of text. A general client
would use more CPU than the server under test.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.load.open_loop import percentile


@dataclass(frozen=True, slots=True)
class Wave:
    """Concurrent texts: the arrivals of each, and the tokens of all together."""

    streams: Sequence[Sequence[float]]
    num_tokens: int

    @property
    def seconds(self) -> float:
        """Seconds until the last text ended."""
        return max(stream[-1] for stream in self.streams)


def figures(waves: Sequence[Wave], tokens_per_stream: int) -> dict[str, float]:
    """Return the figures of waves of the same size. The gap between tokens is a mean within a stream and a median over streams."""
    streams = [stream for wave in waves for stream in wave.streams]
    firsts = [1_000 * stream[0] for stream in streams]
    gaps = [1_000 * (stream[-1] - stream[0]) / max(1, tokens_per_stream - 1) for stream in streams]
    return {
        "ttft_p50_ms": round(percentile(firsts, 0.5), 2),
        "ttft_p99_ms": round(percentile(firsts, 0.99), 2),
        "gap_p50_ms": round(median(gaps), 3),
        "tokens_per_s": round(median(wave.num_tokens / wave.seconds for wave in waves), 2),
    }


def row(num_streams: int, engine: Sequence[Wave], door: Sequence[Wave], tokens_per_stream: int) -> dict[str, Any]:
    """Return one case: the bare engine, the API, and the share of the engine's speed that the API keeps."""
    bare, through = figures(engine, tokens_per_stream), figures(door, tokens_per_stream)
    return {
        "streams": num_streams,
        "waves": len(door),
        "engine": bare,
        "door": through,
        "chunks_per_text": round(sum(len(one) for wave in door for one in wave.streams) / (len(door) * num_streams), 1),
        "door_over_engine": {
            "tokens_per_s": round(through["tokens_per_s"] / bare["tokens_per_s"], 3),
            "gap": round(bare["gap_p50_ms"] / through["gap_p50_ms"], 3),
            "ttft_added_ms": round(through["ttft_p50_ms"] - bare["ttft_p50_ms"], 2),
        },
    }


_EVENT, _TEXT, _DONE = b"data: ", b'"choices":[{', b"[DONE]"


class TextClient:
    """Requests texts of one model. `key` is an API key, if the stack requires one."""

    def __init__(self, host: str, port: int, model: str, key: str = "none") -> None:
        self._address = (host, port)
        self._model = model
        self._key = key

    async def wave(self, prompts: Sequence[Sequence[int]], num_new: int) -> Wave:
        """Request all of these at once. Raises RuntimeError for an error or a short text."""
        streams = await asyncio.gather(*(self._stream(prompt, num_new) for prompt in prompts))
        return Wave(streams, num_new * len(streams))

    async def _stream(self, prompt: Sequence[int], num_new: int) -> list[float]:
        """Return the seconds from the request to each chunk with text."""
        body = json.dumps(self._body(prompt, num_new)).encode()
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(self._head(len(body)) + body)
            status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
            if status != 200:
                raise RuntimeError(
                    f"the server answered {status}: {(await reader.read(2_000)).decode(errors='replace')}"
                )
            return await _arrivals(reader, began, num_new)
        finally:
            writer.close()

    def _body(self, prompt: Sequence[int], num_new: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _head(self, length: int) -> bytes:
        fields = {"host": self._address[0], "authorization": f"Bearer {self._key}", "content-length": length}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST /v1/completions HTTP/1.1\r\n{lines}content-type: application/json\r\n\r\n".encode()


async def _arrivals(reader: asyncio.StreamReader, began: float, num_new: int) -> list[float]:
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    async for line in reader:
        if not line.startswith(_EVENT):
            continue
        if _DONE in line:
            break
        if _TEXT in line:
            arrivals.append(time.perf_counter() - began)
        else:
            usage = json.loads(line[len(_EVENT) :]).get("usage") or {}
    if usage.get("completion_tokens") != num_new:
        raise RuntimeError(f"{num_new} tokens were requested, and {usage} came")
    return arrivals
