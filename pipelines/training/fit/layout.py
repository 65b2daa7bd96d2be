"""How a model and its batches are laid out over the ranks: the words of `--parallel`. Pure."""

from pipelines.planner.mesh import Layout
from services.errors import ConfigError

AUTO = "auto"
_KINDS = "auto, ddp, fsdp, tpK for a K above 1, or fsdp+tpK"


def layout_of(words: str, workers: int) -> Layout:
    """Return the layout of `--parallel` over so many workers. Raises ConfigError naming the option."""
    kinds, tensor = words.split("+"), 1
    if kinds[-1].startswith("tp") and kinds[-1][2:].isdecimal():
        tensor = int(kinds.pop()[2:])
        if tensor < 2 or workers % tensor:
            raise ConfigError(f"--parallel: {words} divides {workers} workers by {tensor}; give a divisor above 1")
    left = workers // tensor
    if kinds in ([AUTO], ["ddp"]) and tensor == 1:
        return Layout(data=left)
    if kinds == ["fsdp"] or (not kinds and left == 1):
        return Layout(shard=left, tensor=tensor)
    if not kinds:
        raise ConfigError(
            f"--parallel: {words} leaves {left} groups of workers without a layout; give fsdp+{words}, or as many workers"
        )
    raise ConfigError(f"--parallel: {words!r} is not known; give {_KINDS}")
