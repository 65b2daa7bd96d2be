"""Which process has which model in memory, from the metrics of a machine's processes. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

SHARED = "(shared)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentModel:
    """A model in a process's memory, or a model that cannot be loaded; `SHARED` for memory that several models share.

    `process` is empty for a single process. `num_bytes` is None without a memory limit. Loads and evictions, by reason,
    count all processes of its part (`llm` or `gateway`) since their start.
    """

    part: str
    process: str
    name: str
    num_bytes: int | None
    num_loads: int = 0
    num_evicted_for_room: int = 0
    num_evicted_idle: int = 0
    has_failed: bool = False


def resident_models(metrics: "Iterable[Metric]") -> list[ResidentModel]:
    """Return each model in memory or with a failed load, by part, process and name.

    Processes without a memory limit keep each model that they have loaded.
    """
    samples = [sample for metric in metrics for sample in metric.samples]
    in_memory = [sample for sample in samples if sample.name == "tailrace_model_resident_bytes"]
    counting = {sample.labels["part"] for sample in in_memory if sample.value}

    def total(metric: str, part: str, name: str, **labels: str) -> int:
        """Return the sum of a metric's samples with these labels."""
        wanted = {"part": part, "name": name, **labels}.items()
        return int(sum(sample.value for sample in samples if sample.name == metric and wanted <= sample.labels.items()))

    models = [
        ResidentModel(
            part=sample.labels["part"],
            process=sample.labels.get("pid", ""),
            name=SHARED,
            num_bytes=int(sample.value),
        )
        for sample in samples
        if sample.name == "tailrace_model_shared_bytes" and sample.value
    ]
    for sample in in_memory:
        part, name, process = (sample.labels.get(label, "") for label in ("part", "name", "pid"))
        has_failed = bool(total("tailrace_model_load_failed", part, name))
        loads = total("tailrace_model_loads_total", part, name)
        room, idle = (total("tailrace_model_evictions_total", part, name, reason=reason) for reason in ("room", "idle"))
        is_kept = part not in counting and loads > room + idle
        if sample.value or has_failed or is_kept:
            models.append(
                ResidentModel(
                    part=part,
                    process=process,
                    name=name,
                    num_bytes=None if is_kept else int(sample.value),
                    num_loads=loads,
                    num_evicted_for_room=room,
                    num_evicted_idle=idle,
                    has_failed=has_failed,
                )
            )
    return sorted(models, key=lambda model: (model.part, model.process, model.name))
