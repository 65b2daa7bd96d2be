"""`--parallel auto`: picks the trainer's layout that the planner predicts to be fastest on these GPUs. Pure."""

from dataclasses import replace

import structlog

from models.decoder.config import DecoderConfig
from pipelines.planner.devices import Gpus
from pipelines.planner.layouts import best_layouts
from pipelines.planner.shapes import shape_of
from pipelines.training.options import Recompute
from pipelines.training.parallel.layout import words_of
from pipelines.training.workers.team import Team

log = structlog.get_logger()

_MANY = 100
"""Layouts to consider; some of their products are not offered."""


def planned(team: Team, config: DecoderConfig, gpus: Gpus, batch_tokens: int, length: int) -> Team:
    """Return the team with its layout, and with recomputation if memory requires it.

    If no layout fits, the team is unchanged; `tailrace plan model` shows why.
    """
    rows = max(1, batch_tokens // length // gpus.number) * gpus.number
    for layout in best_layouts(shape_of(config, "decoder"), gpus, rows, length, _MANY):
        words = words_of(layout)
        if words is None:
            continue
        recompute = max(team.recompute, layout.checkpointing, key=[str(mode) for mode in Recompute].index)
        log.info("layout_planned", layout=layout.name, recompute=recompute, device=gpus.device.name)
        return replace(team, parallel=words, recompute=recompute)
    log.warning("no_layout_fits", device=gpus.device.name, number=gpus.number)
    return team
