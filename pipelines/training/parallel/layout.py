"""Parses `--parallel`: how a model and its batches are laid out over the ranks. Pure."""

import re

from pipelines.planner.mesh import MICRO_BATCHES, ParallelLayout
from services.errors import ConfigError

AUTO = "auto"
KINDS = "auto, ddp, fsdp, hsdpK, tpK, ppK, ddp+tpK, fsdp+tpK or ppK+ddp"
_WORD = re.compile(r"(ddp|fsdp)|(hsdp|tp|pp)([0-9]+)")
_OFFERED = ({"ddp"}, {"fsdp"}, {"hsdp"}, {"tp"}, {"pp"}, {"ddp", "tp"}, {"fsdp", "tp"}, {"pp", "ddp"})


def layout_of(words: str, workers: int) -> ParallelLayout:
    """Return the layout of `--parallel` for this number of workers. Raises ConfigError naming the option."""
    if words == AUTO:
        return ParallelLayout(data=workers)
    sizes: dict[str, int] = {}
    for word in words.split("+"):
        match = _WORD.fullmatch(word)
        kind, size = (match[1] or match[2], int(match[3] or 0)) if match else ("", 0)
        if not kind or kind in sizes:
            raise ConfigError(f"--parallel: {words!r} is not known; give {KINDS}, for a K above 1")
        sizes[kind] = size
    if sizes.keys() not in _OFFERED:
        raise ConfigError(f"--parallel: {words} is not offered; give {KINDS}")
    left = workers
    for kind in ("pp", "tp", "hsdp"):
        if kind in sizes:
            if sizes[kind] < 2 or left % sizes[kind]:
                raise ConfigError(
                    f"--parallel: {words} divides {left} workers by {sizes[kind]}; give a divisor above 1"
                )
            left //= sizes[kind]
    if left > 1 and not sizes.keys() & {"ddp", "fsdp", "hsdp"}:
        more = f"{words}+ddp" + (f", fsdp+{words}" if "tp" in sizes else "")
        raise ConfigError(
            f"--parallel: {words} leaves {left} groups of workers without a layout; give {more}, or as many workers"
        )
    return ParallelLayout(
        data=1 if "fsdp" in sizes else left,
        shard=left if "fsdp" in sizes else sizes.get("hsdp", 1),
        tensor=sizes.get("tp", 1),
        pipeline=sizes.get("pp", 1),
        accumulation=MICRO_BATCHES * sizes["pp"] if "pp" in sizes else 1,
    )


def words_of(layout: ParallelLayout) -> str | None:
    """Return the `--parallel` value of a layout; None if it is not offered."""
    is_hybrid = layout.shard > 1 and layout.data > 1
    parts = {
        f"pp{layout.pipeline}": layout.pipeline > 1,
        f"hsdp{layout.shard}": is_hybrid,
        "fsdp": layout.shard > 1 and not is_hybrid,
        "ddp": layout.data > 1 and not is_hybrid,
        f"tp{layout.tensor}": layout.tensor > 1,
    }
    words = "+".join(part for part, is_in in parts.items() if is_in) or AUTO
    kinds = {part.rstrip("0123456789") for part, is_in in parts.items() if is_in}
    return words if kinds in _OFFERED or not kinds else None
