"""The differences of a report by day as PNGs, by matplotlib, which is loaded lazily."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_pictures(report: Mapping[str, Any], stem: Path) -> dict[str, str]:
    """Draw a picture for each metric with a difference, as `<stem>-<metric>.png`; return the file names by metric.

    Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names: dict[str, str] = {}
    for metric in dict.fromkeys(difference["metric"] for difference in report["differences"]):
        differences = [
            difference
            for difference in report["differences"]
            if difference["metric"] == metric and difference["estimate"] is not None
        ]
        if not differences:
            continue
        figure = Figure(figsize=(7, 2.6), layout="constrained")
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        days = [day[5:] for day in report["days"]]
        for difference in differences:
            looks = [(index, *look) for index, look in enumerate(difference["by_day"]) if look[0] is not None]
            indices, estimates, lows, highs = zip(*looks, strict=True)
            axis.plot(indices, estimates, marker="o", markersize=3, label=difference["variant"])
            axis.fill_between(indices, lows, highs, alpha=0.2)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_ylabel(f"{metric} less {report['control']}", fontsize=8)
        axis.tick_params(labelsize=7)
        marks = range(0, len(days), max(1, len(days) // 8))
        axis.set_xticks(marks, [days[mark] for mark in marks])
        axis.legend(fontsize=7)
        names[metric] = f"{stem.name}-{metric}.png"
        figure.savefig(stem.with_name(names[metric]), format="png", dpi=120)
    return names
