"""Two engines that swap under load: rankings of one, while the next is loaded and captured on the same card, then of the next.

    python -m benchmarks.gpu.swap cuda OUT [--tiny]

A thread ranks in a closed loop, four at a time; the main thread builds the next engine over the same KV memory, as a new bundle does. The times of rankings
before, while and after are what a caller sees of a swap.
"""

import argparse
import threading
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine.cases import code_table
from benchmarks.engine.shapes import random_decoder
from benchmarks.engine.tailrace import item_codes
from benchmarks.load.command import write_report
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine

_AT_ONCE = 4


class Load:
    """A thread that ranks with the current engine until it is stopped, and keeps each ranking's time with its phase."""

    def __init__(self, engine: Engine, vocab_size: int, prompt_len: int) -> None:
        self.engine = engine
        self.phase = "before"
        self._vocab_size, self._prompt_len = vocab_size, prompt_len
        self.times_s: dict[str, list[float]] = {}
        self.failure: BaseException | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Raises what it failed with."""
        self._is_stopped.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def wait_for(self, phase: str, count: int) -> None:
        """Wait until this many rankings ended in a phase."""
        self.phase = phase
        while len(self.times_s.get(phase, ())) < count and self._thread.is_alive():
            time.sleep(0.001)

    def _run(self) -> None:
        draw = np.random.default_rng(0)
        try:
            while not self._is_stopped.is_set():
                self._rank(self.engine, draw)
        except BaseException as error:  # noqa: BLE001 - `stop` raises it
            self.failure = error

    def _rank(self, engine: Engine, draw: np.random.Generator) -> None:
        phase, began_s = self.phase, time.perf_counter()
        for place in range(_AT_ONCE):
            prompt = draw.integers(0, self._vocab_size, self._prompt_len).tolist()
            engine.add_rank(f"{place}", prompt, k=10, beam_width=16)
        while engine.has_work:
            for outcome in engine.step(0.0):
                assert len(outcome.item_indices), "a ranking found no items"
                self.times_s.setdefault(phase, []).append(time.perf_counter() - began_s)


def main() -> None:
    """Swap twice, write the times of each phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shape, count, prompt_len = ("tiny", 8, 40) if options.tiny else ("qwen3-0.6b", 400, 300)
    device = torch.device(options.device)
    first, _ = _engine(shape, device)
    load = Load(first, 100, prompt_len)
    loading_s = []
    try:
        load.wait_for("before", count)
        for number in (1, 2):
            load.phase = f"while loading {number}"
            engine, seconds = _engine(shape, device, load.engine)
            loading_s.append(seconds)
            load.wait_for(load.phase, 1)
            load.engine = engine
            load.wait_for(f"after {number}", count)
    finally:
        load.stop()
    report = {"shape": shape, "at_once": _AT_ONCE, "loading_s": loading_s, "phases": _phases(load.times_s)}
    write_report(options.out, report)
    print(report)


def _engine(shape: str, device: torch.device, before: Engine | None = None) -> tuple[Engine, float]:
    began_s = time.perf_counter()
    decoder = random_decoder(shape, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    items = item_codes(code_table(decoder.config.vocab_size))
    config = EngineConfig(num_blocks=256, max_running=8, max_beam_rows=128, cpu_kernels="torch")
    memory = None if before is None else before.memory
    engine = Engine(decoder, config, items=items, bundle_version="swap", memory=memory)
    engine.warm_up()
    return engine, time.perf_counter() - began_s


def _phases(times_s: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        phase: {
            "rankings": len(times),
            **{f"p{share}_ms": 1_000 * float(np.percentile(times, share)) for share in (50, 99, 100)},
        }
        for phase, times in times_s.items()
    }


if __name__ == "__main__":
    main()
