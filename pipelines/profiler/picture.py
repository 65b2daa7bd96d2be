"""The timeline of several ranks as a PNG. Only this file draws; it imports matplotlib when it does."""

from collections.abc import Sequence
from pathlib import Path

from pipelines.profiler.report import RankProfile
from pipelines.profiler.timeline import COLOURS, bars, rows_of

_PIXELS = 2_000


def write_png(profiles: Sequence[RankProfile], path: Path) -> None:
    """Draw the rows of each rank below each other. Raises OSError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [rows_of(profile.activity) for profile in profiles]
    heights = [max(1, len(intervals_by_name)) for intervals_by_name in rows]
    figure = Figure(figsize=(12, 0.8 * len(rows) + 0.3 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, profile, shown in zip(axes, profiles, rows, strict=True):
        span_ms = profile.parts.span_us / 1_000
        for index, (name, intervals) in enumerate(shown.items()):
            drawn = [
                (first / _PIXELS * span_ms, length / _PIXELS * span_ms)
                for first, length in bars(intervals, profile.parts.span_us, _PIXELS)
            ]
            axis.broken_barh(drawn, (-index - 0.4, 0.8), facecolors=COLOURS[name])
        axis.set_yticks([-index for index in range(len(shown))], [name.replace("_", " ") for name in shown])
        axis.set_xlim(0, span_ms)
        axis.set_title(f"rank {profile.trace.rank}: {profile.verdict.bottleneck.value}", loc="left", fontsize=9)
    axes[-1].set_xlabel("ms")
    figure.savefig(path, format="png", dpi=120)
