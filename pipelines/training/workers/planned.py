"""`--parallel auto`: of the layouts that the trainer offers, the one that the planner finds fastest on these GPUs. Pure."""

from dataclasses import replace

import structlog

from models.decoder.config import DecoderConfig
from pipelines.planner.devices import Gpus
from pipelines.planner.layouts import best_layouts
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
