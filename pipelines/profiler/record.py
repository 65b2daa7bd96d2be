"""Records a trace: torch's profiler around training steps, rankings or texts, with the device's limits noted in it.

The work runs once unrecorded, to exclude compilation, allocation and first touches. Recording also measures the
device's limits and takes the minimal cost of compiled code from the engine's cost model, neither of which a trace
contains otherwise.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipelines.profiler.events import OUR_METADATA
from services.llm.engine.cost.cost_model import StepCost
from services.llm.engine.cost.machine_limits import measure_limits
from services.llm.engine.engine import Engine

Work = Callable[[], Sequence[StepCost]]
"""Does the work to record once, and returns the least cost of the engine's steps in it."""
_NUM_WARM_UP = 2
_COMPILED, _STEP = f"{OUR_METADATA}::compiled", f"{OUR_METADATA}::step"
"""Ranges of the engine's compiled code (`engine/cpu/library.py`) and of a step around it, whose gaps are the host's."""


def record(work: Work, out: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Record a trace into `out`, .json or .json.gz."""
    for _ in range(_NUM_WARM_UP):
        work()
    limits = measure_limits(device, dtype)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # noqa: TID251 - torch reads it: no lines of its recorder on stderr
    with profile(activities=activities, record_shapes=True) as recorded:
        costs = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        measured = {
            "dtype": "fp32" if dtype is torch.float32 else "bf16",
            "flops_per_s": limits.flops_per_s,
            "bytes_per_s": limits.bytes_per_s,
            "operations": {_COMPILED: [sum(cost.flops for cost in costs), sum(cost.num_bytes for cost in costs)]},
        }
        recorded.add_metadata_json(OUR_METADATA, json.dumps(measured))
    recorded.export_chrome_trace(str(out))


def training(steps: Callable[[], Iterator[Callable[[], object]]]) -> Work:
    """Return the work of some training steps. `steps` yields them; preceding batch preparation is the wait for data."""

    def work() -> Sequence[StepCost]:
        made = steps()
        while True:
            with record_function("data"):
                step = next(made, None)
            if step is None:
                return ()
            with record_function(_STEP):
                step()

    return work


def of_engine(engine: Engine, add: Callable[[np.random.Generator], None]) -> Work:
    """Return the work of requests that `add` submits to the engine, with new prompts that miss the prefix cache."""
    draw = np.random.default_rng(0)

    def work() -> Sequence[StepCost]:
        add(draw)
        return _drained(engine)

    return work


def _drained(engine: Engine) -> list[StepCost]:
    costs = []
    with engine.stream.entered():
        while engine.has_work:
            with record_function(_STEP):
                engine.step(0.0)
            if engine.last_cost is not None:
                costs.append(engine.last_cost)
    return costs
