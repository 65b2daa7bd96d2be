"""The lightest reader of streamed completions: one connection per text, HTTP/1.1 and server-sent events by hand.

A general client would use more of the cores than the door under test does.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.text.figures import Wave

_EVENT, _TEXT, _DONE = b"data: ", b'"choices":[{', b"[DONE]"


class TextCaller:
    """Asks one door for texts of one model. `key` is an API key, if the door asks for one."""

    def __init__(self, host: str, port: int, model: str, key: str = "none") -> None:
        self._address = (host, port)
        self._model = model
        self._key = key

    async def wave(self, prompts: Sequence[Sequence[int]], num_new: int) -> Wave:
        """Ask for all of these at once. Raises RuntimeError for an answer that is an error, or too short."""
        streams = await asyncio.gather(*(self._stream(prompt, num_new) for prompt in prompts))
        return Wave(streams, num_new * len(streams))

    async def _stream(self, prompt: Sequence[int], num_new: int) -> list[float]:
        """Return the seconds from the asking to each chunk with text."""
        body = json.dumps(self._body(prompt, num_new)).encode()
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(self._head(len(body)) + body)
            status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
            if status != 200:
                raise RuntimeError(f"the door says {status}: {(await reader.read(2_000)).decode(errors='replace')}")
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
        raise RuntimeError(f"{num_new} tokens were asked for, and {usage} came")
    return arrivals
