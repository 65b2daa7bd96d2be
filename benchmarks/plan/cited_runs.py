"""Published training runs beyond FSDP in bf16 on A100 and H100 (cited_runs.json), and the planner's predictions.

Throughput is in tokens per second and GPU; where a source gives only model TFLOP/s per GPU, it is converted by that
source's own count of FLOPs. Techniques are the trainer's. The file names each source and its particulars.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plan.runs import Predicted
from pipelines.planner.devices import Device, Gpus, device_named
from pipelines.planner.mesh import Execution, ParallelLayout
from pipelines.planner.shapes import DecoderShape, Experts
from pipelines.planner.step_time import Constants, Group, group_of, step_time

_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class CitedRun:
    """One published run."""

    source: str
    shape: DecoderShape
    device: Device
    layout: ParallelLayout
    length: int
    dtype: str = "bf16"
    tokens_per_s: float
    """Of one GPU."""

    def group(self, constants: Constants) -> Group:
        return group_of(self.shape, self.layout, self.device, constants, dtype=self.dtype)


def predict_cited(run: CitedRun, constants: Constants | None = None) -> Predicted:
    """Return the planner's tokens per second and GPU for a run."""
    layout = run.layout
    step = step_time(
        run.shape,
        layout,
        run.length,
        Gpus(run.device, layout.num_gpus),
        dtype=run.dtype,
        constants=constants,
    )
    tokens = layout.batch * run.length / layout.num_gpus
    return Predicted(tokens / step.total_s, tokens / step.high_s, tokens / step.low_s)


def _read() -> Iterator[CitedRun]:
    file = json.loads(_FILE.read_text())
    for row in file["runs"]:
        shape: dict[str, Any] = dict(file["shapes"][row.pop("shape")])
        if experts := shape.pop("experts", None):
            shape["experts"] = Experts(**experts)
        if windows := shape.pop("windows", None):
            shape["windows"] = tuple(windows)
        device = device_named(row.pop("device"))
        if bandwidth := row.pop("memory_bytes_per_s", None):
            device = replace(device, memory_bytes_per_s=bandwidth)
        layout = ParallelLayout(**row.pop("layout"), execution=Execution(**row.pop("execution")))
        yield CitedRun(shape=DecoderShape(**shape), device=device, layout=layout, **row)


CITED_RUNS = tuple(_read())
