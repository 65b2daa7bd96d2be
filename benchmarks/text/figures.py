"""From the arrivals of tokens to what is published of a text server: first token, gap, tokens a second, ratios. Pure.

Both ends are measured the same way: a wave is so many texts asked for at once, a stream the seconds from the asking to each
arrival of text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.load.open_loop import percentile


@dataclass(frozen=True, slots=True)
class Wave:
    """Texts that were asked for at once: the arrivals of each, and the tokens of all together."""

    streams: Sequence[Sequence[float]]
    num_tokens: int

    @property
    def seconds(self) -> float:
        """How long it took until the last one ended."""
        return max(stream[-1] for stream in self.streams)


def figures(waves: Sequence[Wave], tokens_per_stream: int) -> dict[str, float]:
    """Return the figures of waves of the same size. The gap is the mean of a stream, the median over streams."""
    streams = [stream for wave in waves for stream in wave.streams]
    firsts = [1_000 * stream[0] for stream in streams]
    gaps = [1_000 * (stream[-1] - stream[0]) / max(1, tokens_per_stream - 1) for stream in streams]
    return {
        "ttft_p50_ms": round(percentile(firsts, 0.5), 2),
        "ttft_p99_ms": round(percentile(firsts, 0.99), 2),
        "gap_p50_ms": round(median(gaps), 3),
        "tokens_per_s": round(median(wave.num_tokens / wave.seconds for wave in waves), 2),
    }


def row(num_streams: int, engine: Sequence[Wave], door: Sequence[Wave], tokens_per_stream: int) -> dict[str, Any]:
    """Return one case: the bare engine, the door, and how much of the engine's speed comes through it."""
    bare, through = figures(engine, tokens_per_stream), figures(door, tokens_per_stream)
    return {
        "streams": num_streams,
        "waves": len(door),
        "engine": bare,
        "door": through,
        "chunks_per_text": round(sum(len(one) for wave in door for one in wave.streams) / (len(door) * num_streams), 1),
        "door_over_engine": {
            "tokens_per_s": round(through["tokens_per_s"] / bare["tokens_per_s"], 3),
            "gap": round(bare["gap_p50_ms"] / through["gap_p50_ms"], 3),
            "ttft_added_ms": round(through["ttft_p50_ms"] - bare["ttft_p50_ms"], 2),
        },
    }
