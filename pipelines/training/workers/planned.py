"""What the planner says of a team: for `--parallel auto` the fastest layout that the trainer offers on these GPUs, and the memory that steps take. Pure."""

from dataclasses import replace
from typing import cast

import structlog

from models.decoder.config import DecoderConfig
from pipelines.planner.devices import Gpus
from pipelines.planner.layouts import best_layouts
from pipelines.planner.memory import training_memory
from pipelines.planner.mesh import MICRO_BATCHES, Checkpointing
from pipelines.planner.shapes import shape_of
from pipelines.training.fit.layout import words_of
from pipelines.training.fit.recompute import Recompute
from pipelines.training.workers.team import Team

log = structlog.get_logger()

_MANY = 100
"""Layouts to look through, of which some products are not offered."""


def planned(team: Team, config: DecoderConfig, gpus: Gpus, batch_tokens: int, length: int) -> Team:
    """Return the team with its layout, and with what is computed again where memory asks for it. Without a layout that fits it stays as it is, and the planner says why (`tailrace plan model`)."""
    rows = max(1, batch_tokens // length // gpus.number) * gpus.number
    for layout in best_layouts(shape_of(config, "decoder"), gpus, rows, length, _MANY):
        words = words_of(layout)
        if words is None:
            continue
        recompute = max(team.recompute, layout.checkpointing, key=[str(one) for one in Recompute].index)
        log.info("layout_planned", layout=layout.name, recompute=recompute, device=gpus.device.name)
        return replace(team, parallel=words, recompute=recompute)
    log.warning("no_layout_fits", device=gpus.device.name, number=gpus.number)
    return team


def predicted_memory(
    team: Team, config: DecoderConfig, batch_tokens: int, num_parts: int, *, is_gpu: bool, accumulation: int
) -> str:
    """Describe the memory that the planner predicts for a rank's steps, by component, with each batch in so many parts."""
    layout, parts = team.layout, num_parts * accumulation
    tokens = -(-batch_tokens // (parts * layout.data * layout.shard))
    if layout.pipeline > 1:
        layout = replace(layout, accumulation=MICRO_BATCHES * layout.pipeline)
        tokens = -(-tokens // layout.accumulation)
    layout = replace(layout, micro_batch=tokens, checkpointing=cast("Checkpointing", str(team.recompute)))
    found = training_memory(shape_of(config, "decoder"), layout, fuses_norms=is_gpu)
    sizes = {name: size for name, size in found.parts.items() if name != "framework"}
    listed = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in sorted(sizes.items(), key=lambda part: -part[1]))
    return f"{sum(sizes.values()) / 1e6:,.0f} MB are predicted with a batch in {parts} parts ({listed})"
