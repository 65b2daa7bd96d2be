"""Our engine as a contestant: through its public door, one step after another, each step's time beside what it cost at least.

    python -m benchmarks.engine.tailrace '{"model": FOLDER or "shape:qwen3-1.7b", "device": "cuda", "threads": 2}'

Runs with torch, numpy and safetensors alone.
"""

import gc
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.cases import CodeTable, code_table
from benchmarks.engine.shapes import random_decoder
from benchmarks.engine.steps import CudaClock, HostClock, drain
from benchmarks.engine.worker import Ask, Reply, serve
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.machine_limits import measure_limits
from services.llm.engine.engine import Engine
from services.llm.engine.text.parameters import Sampling

_SHAPE = "shape:"


class TailraceContestant:
    """One engine over one decoder, with a catalogue beside its text."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._device = torch.device(options["device"])
        self._dtype = getattr(torch, options["dtype"])
        decoder = _load(options["model"], self._dtype, self._device)
        self._codes = code_table(decoder.config.vocab_size)
        config = EngineConfig(**options.get("config", {}))
        self._engine = Engine(decoder, config, items=_items(self._codes), bundle_version="benchmark")
        self._engine.warm_up()
        gc.collect()
        gc.freeze()  # as the deployments do

    def describe(self) -> Reply:
        """Return versions and the device."""
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else platform.machine()
        return {
            "versions": {"torch": torch.__version__},
            "device": device,
            "constraint": "held to the catalogue by its trie",
        }

    def answer(self, ask: Ask) -> Reply:
        """Write, rank, or measure the machine's limits."""
        if ask["do"] == "limits":
            return asdict(measure_limits(self._device, self._dtype, effort=ask["effort"]))
        for number, prompt in enumerate(ask["prompts"]):
            self._add(str(number), prompt, ask, number)
        outcomes, steps = drain(self._engine, CudaClock() if self._device.type == "cuda" else HostClock())
        outcomes.sort(key=lambda outcome: int(outcome.request_id))
        if ask["do"] == "rank":
            outputs = [self._codes.codes[outcome.item_indices].tolist() for outcome in outcomes]
        else:
            outputs = [list(outcome.token_ids) for outcome in outcomes]
        return {"outputs": outputs, "steps": steps, "graphs": asdict(self._engine.graph_counts)}

    def _add(self, request_id: str, prompt: list[int], ask: Ask, number: int) -> None:
        if ask["do"] == "rank":
            allowed = np.ones(len(self._codes.codes), dtype=bool)
            self._engine.add_rank(request_id, prompt, k=ask["num_best"], allowed=allowed, beam_width=ask["width"])
        else:
            sampling = Sampling(temperature=ask.get("temperature", 0.0), seed=number)
            self._engine.add_text(request_id, prompt, max_new_tokens=ask["num_new"][number], sampling=sampling)


def _load(model: str, dtype: torch.dtype, device: torch.device) -> Decoder:
    if model.startswith(_SHAPE):
        return random_decoder(model.removeprefix(_SHAPE), dtype, device)
    return load_decoder(Path(model), dtype, device)


def _items(table: CodeTable) -> ItemCodes:
    sizes = (table.level_size,) * len(table.token_offsets)
    return ItemCodes(codes=table.codes, level_sizes=sizes, token_offsets=table.token_offsets)


if __name__ == "__main__":
    serve(TailraceContestant)
