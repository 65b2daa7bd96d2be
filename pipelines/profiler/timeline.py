"""The timeline of several ranks as a self-contained HTML file: rows of activity, shares, operations, the sentence."""

from collections.abc import Sequence
from html import escape

from pipelines.profiler.activity import Activity
from pipelines.profiler.intervals import Intervals
from pipelines.profiler.report import SHARE_NAMES, RankProfile, operation_line
from pipelines.profiler.verdict import common_verdict

COLOURS = {
    "compute": "#2b6cb0",
    "memory": "#63b3ed",
    "dispatch": "#a0aec0",
    "communication": "#d53f8c",
    "copy": "#805ad5",
    "launch": "#ecc94b",
    "data_wait": "#e53e3e",
    "host": "#718096",
}
"""Colours of a timeline's rows, from top to bottom."""
_WIDTH, _ROW, _LABEL = 1_200, 18, 130
_STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:1360px}svg text{font:11px sans-serif}"
    "table{border-collapse:collapse}td{padding:1px 12px 1px 0}td.n{text-align:right}p.v{font-weight:bold}"
)


def rows_of(activity: Activity) -> dict[str, Intervals]:
    """Return the intervals of each non-empty row, in microseconds from the start of the span."""
    rows = {name: getattr(activity, name) - activity.start_us for name in COLOURS}
    return {name: intervals for name, intervals in rows.items() if len(intervals)}


def bars(intervals: Intervals, span_us: float, width: int) -> list[tuple[int, int]]:
    """Return (first, length) in pixels; touching bars are merged, and the minimum is one pixel."""
    drawn: list[tuple[int, int]] = []
    for start_us, end_us in intervals:
        first, last = int(width * start_us / span_us), int(width * end_us / span_us)
        last = min(max(last, first + 1), width)
        if drawn and first <= drawn[-1][0] + drawn[-1][1]:
            begun = drawn[-1][0]
            drawn[-1] = (begun, max(last, begun + drawn[-1][1]) - begun)
        elif first < last:
            drawn.append((first, last - first))
    return drawn


def as_html(profiles: Sequence[RankProfile]) -> str:
    """Return the page."""
    verdict = common_verdict([profile.verdict for profile in profiles])
    ranks = "".join(_rank(profile) for profile in profiles)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Profile</title>'
        f"<style>{_STYLE}</style></head>"
        f'<body><h1>Profile</h1><p class="v">{escape(verdict.sentence)}</p>{ranks}</body></html>\n'
    )


def _rank(profile: RankProfile) -> str:
    span_ms = profile.parts.span_us / 1_000
    shares = "".join(
        (
            f'<tr><td>{SHARE_NAMES[name]}</td><td class="n">{share:.1%}</td>'
            f'<td class="n">{share * span_ms:,.2f} ms</td></tr>'
        )
        for name, share in profile.shares.items()
    )
    operations = "".join(
        f"<li><code>{escape(operation_line(operation))}</code></li>" for operation in profile.operations
    )
    return (
        f"<h2>Rank {profile.trace.rank}: {span_ms:,.1f} ms</h2><p>{escape(profile.verdict.sentence)}</p>"
        f"{_picture(profile)}"
        f"<table>{shares}</table><ol>{operations}</ol>"
    )


def _picture(profile: RankProfile) -> str:
    rows = rows_of(profile.activity)
    height = _ROW * len(rows) + 20
    drawn = [f'<svg width="{_LABEL + _WIDTH}" height="{height}" role="img">']
    for index, (name, intervals) in enumerate(rows.items()):
        top = index * _ROW
        drawn.append(f'<text x="0" y="{top + 13}">{name.replace("_", " ")}</text>')
        drawn += [
            f'<rect x="{_LABEL + first}" y="{top + 2}" width="{length}" height="{_ROW - 4}" fill="{COLOURS[name]}"/>'
            for first, length in bars(intervals, profile.parts.span_us, _WIDTH)
        ]
    for quarter in range(5):
        shown = f"{profile.parts.span_us / 1_000 * quarter / 4:,.1f} ms"
        anchor = "end" if quarter == 4 else "start"
        drawn.append(
            f'<text x="{_LABEL + _WIDTH * quarter / 4}" y="{height - 4}" text-anchor="{anchor}">{shown}</text>'
        )
    return "".join([*drawn, "</svg>"])
