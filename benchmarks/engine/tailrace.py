"""Our engine in the comparison: through its public interface, step by step, with each step's time and minimum cost.

    python -m benchmarks.engine.tailrace '{"model": FOLDER or "shape:qwen3-1.7b", "device": "cuda", "threads": 2}'

Needs only torch, numpy and safetensors.

An asynchronous engine reports a step's cost one call after it started the step, and rankings start several steps ahead
of the device: a step lasts from the end of the previous one to its own end, which on CUDA the device reports.
"""

import platform
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.cases import CodeTable, code_table
from benchmarks.engine.shapes import random_decoder
from benchmarks.engine.worker import Reply, Request, serve
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from models.search import Scores
from services.garbage import freeze_start
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.cost_model import StepCost, StepKind
from services.llm.engine.cost.machine_limits import measure_limits
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import EngineOutcome
from services.llm.engine.sampling_parameters import SamplingParams

_SHAPE = "shape:"


class TailraceEngine:
    """One engine over one decoder, with text and a catalogue."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._device = torch.device(options["device"])
        self._dtype = getattr(torch, options["dtype"])
        self._options = options
        self._engines: dict[Scores, Engine] = {}
        self._use("catalogue")

    def _use(self, scores: Scores) -> None:
        """Use the engine of this kind of scores; it is built on first use."""
        if scores not in self._engines:
            decoder = _load(self._options["model"], self._dtype, self._device)
            self._codes = code_table(decoder.config.vocab_size, **self._options.get("catalogue", {}))
            has_catalogue = self._options.get("has_catalogue", True)
            engine = Engine(
                decoder,
                EngineConfig(**self._options.get("config", {})),
                items=item_codes(self._codes, scores) if has_catalogue else None,
                bundle_version="benchmark",
            )
            engine.warm_up()
            self._engines[scores] = engine
            freeze_start()
        self._engine = self._engines[scores]

    def describe(self) -> Reply:
        """Return versions and the device."""
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else platform.machine()
        return {
            "versions": {"torch": torch.__version__},
            "device": device,
            "constraint": "held to the catalogue by its trie",
        }

    def answer(self, ask: Request) -> Reply:
        """Generate, rank, stream, or measure the machine's limits."""
        if ask["do"] == "limits":
            return asdict(measure_limits(self._device, self._dtype, effort=ask["effort"]))
        try:
            return self._run(ask)
        except Exception:
            self._end_all(len(ask["prompts"]))
            raise

    def _run(self, ask: Request) -> Reply:
        self._use(ask.get("scores", "catalogue"))
        began_s = time.perf_counter()
        for number, prompt in enumerate(ask["prompts"]):
            self._add(str(number), prompt, ask, number)
        if ask["do"] == "stream":
            return {"streams": self._arrivals(len(ask["prompts"]), began_s)}
        outcomes, steps = drain(self._engine, Clock(self._device))
        outcomes.sort(key=lambda outcome: int(outcome.request_id))
        if ask["do"] == "rank":
            outputs = [self._codes.codes[outcome.item_indices].tolist() for outcome in outcomes]
        else:
            outputs = [list(outcome.token_ids) for outcome in outcomes]
        return {"outputs": outputs, "steps": steps, "graphs": asdict(self._engine.graph_counts)}

    def _end_all(self, num_requests: int) -> None:
        """Abort a failed request's work in flight, so that the next request finds the engine empty."""
        for number in range(num_requests):
            self._engine.cancel(str(number))
        with suppress(Exception):  # the first error is reported
            while self._engine.has_work:
                self._engine.step(0.0)

    def _arrivals(self, num_texts: int, began_s: float) -> list[list[float]]:
        """Step to the end; return for each text the arrival times of its tokens, in seconds."""
        streams: list[list[float]] = [[] for _ in range(num_texts)]
        while self._engine.has_work:
            self._engine.step(0.0)
            arrived_s = time.perf_counter() - began_s
            for grown in self._engine.new_tokens:
                streams[int(grown.request_id)].append(arrived_s)
        return streams

    def _add(self, request_id: str, prompt: list[int], ask: Request, number: int) -> None:
        if ask["do"] == "rank":
            allowed = np.ones(len(self._codes.codes), dtype=bool)
            self._engine.add_rank(request_id, prompt, k=ask["num_best"], allowed=allowed, beam_width=ask["width"])
        else:
            sampling = SamplingParams(temperature=ask.get("temperature", 0.0), seed=number)
            self._engine.add_text(request_id, prompt, max_new_tokens=ask["num_new"][number], sampling=sampling)


def _load(model: str, dtype: torch.dtype, device: torch.device) -> Decoder:
    if model.startswith(_SHAPE):
        return random_decoder(model.removeprefix(_SHAPE), dtype, device)
    return load_decoder(Path(model), dtype, device)


def item_codes(table: CodeTable, scores: Scores = "catalogue") -> ItemCodes:
    """Return the benchmark's catalogue in the engine's form."""
    sizes = (table.level_size,) * len(table.token_offsets)
    return ItemCodes(codes=table.codes, level_sizes=sizes, token_offsets=table.token_offsets, scores=scores)


class Clock:
    """Time stamps on a device: the host's time, or on CUDA the current stream's, which runs behind the host."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._stamps: list[Any] = []

    def stamp(self) -> None:
        """Record a time stamp after all work started so far."""
        if not self._is_cuda:
            self._stamps.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._stamps.append(event)

    def intervals(self) -> list[float]:
        """Return the seconds from each stamp to the next, on CUDA after a wait for the device."""
        if not self._is_cuda:
            return [after - before for before, after in pairwise(self._stamps)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1_000 for before, after in pairwise(self._stamps)]


def drain(engine: Engine, clock: Clock) -> tuple[list[EngineOutcome], dict[str, dict[str, float]]]:
    """Step until the engine has no work. Return the outcomes in order, and time and cost of the steps by kind."""
    outcomes: list[EngineOutcome] = []
    ran: list[tuple[int, StepCost]] = []
    num_calls = 0
    with engine.stream.entered():
        clock.stamp()
        while engine.has_work:
            started = num_calls - engine.is_ahead
            outcomes += engine.step(0.0)
            clock.stamp()
            if engine.last_cost is not None:
                ran.append((started, engine.last_cost))
            num_calls += 1
    seconds = clock.intervals()
    return outcomes, _by_kind((cost, seconds[started]) for started, cost in ran)


@dataclass(slots=True)
class _Spent:
    """Sums over the steps of one kind."""

    steps: int = 0
    seconds: float = 0.0
    num_bytes: float = 0.0
    flops: float = 0.0


def _by_kind(ran: Iterable[tuple[StepCost, float]]) -> dict[str, dict[str, float]]:
    spent: dict[StepKind, _Spent] = defaultdict(_Spent)
    for cost, seconds in ran:
        kind = spent[cost.kind]
        kind.steps += 1
        kind.seconds += seconds
        kind.num_bytes += cost.num_bytes
        kind.flops += cost.flops
    return {kind.value: asdict(totals) for kind, totals in spent.items()}


if __name__ == "__main__":
    serve(TailraceEngine)
