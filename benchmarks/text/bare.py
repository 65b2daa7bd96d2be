"""The bare engine of the text benchmark: requests added at once and stepped to their end, without Ray, HTTP or detokenisation.

python -m benchmarks.text.bare '{"model": FOLDER, "dtype": "bfloat16", "device": "cpu", "threads": 1, "config": {...}}'
"""

import gc
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.worker import Reply, Request, serve
from models.decoder.weights import load_decoder
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine


class BareEngine:
    """One engine, warmed up like the deployment's."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        decoder = load_decoder(Path(options["model"]), getattr(torch, options["dtype"]), options["device"])
        self._engine = Engine(decoder, EngineConfig(**options["config"]), items=None, bundle_version="benchmark")
        self._engine.warm_up()
        gc.collect()
        gc.freeze()  # as the deployment does

    def describe(self) -> Reply:
        """Return the version of torch."""
        return {"torch": torch.__version__}

    def answer(self, ask: Request) -> Reply:
        """Generate after each prompt; return the arrival times of each one's tokens in seconds."""
        began = time.perf_counter()
        for number, prompt in enumerate(ask["prompts"]):
            self._engine.add_text(str(number), prompt, max_new_tokens=ask["num_new"])
        streams: list[list[float]] = [[] for _ in ask["prompts"]]
        while self._engine.has_work:
            self._engine.step(0.0)
            now = time.perf_counter() - began
            for grown in self._engine.new_tokens:
                streams[int(grown.request_id)].append(now)
        return {"streams": streams}


if __name__ == "__main__":
    serve(BareEngine)
