"""An experiment's report as lines for a terminal, and as Markdown with pictures.

Knows only the plain values of `report` and `off_policy`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Sequence[str]
_UNITS = {
    "clicks": "clicks a list",
    "value": "value a list",
    "latency_ms": "latency ms",
    "novelty_bits": "novelty bits",
}


def as_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the report as lines of a terminal, about 100 columns wide at most."""
    lines: list[str] = []
    for title, rows, sentences in _parts(report):
        lines += [title, *_columns(rows), *sentences, ""]
    return lines[:-1]


def as_markdown(report: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """Return the report as Markdown; `pictures` are file names by metric, shown next to the differences."""
    blocks = ["# Experiment report"]
    for title, rows, sentences in _parts(report):
        blocks.append(f"## {title}")
        if rows:
            cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
            blocks.append("\n".join(f"| {' | '.join(row)} |" for row in (cells[0], ["---"] * len(rows[0]), *cells[1:])))
        blocks += sentences
        if title == _DIFFERENCES:
            blocks += [
                f"![{_UNITS[metric]}: the difference by day, with its interval]({name})"
                for metric, name in pictures.items()
            ]
    return "\n\n".join(blocks) + "\n"


_DIFFERENCES = "Differences"


def _parts(report: Mapping[str, Any]) -> Iterator[tuple[str, list[Row], list[str]]]:
    """Yield the report's parts: title, a table (header first, may be empty), sentences."""
    if "variants" in report:
        yield from _compared(report)
    if "a_a" in report:
        a_a = report["a_a"]
        rows: list[Row] = [["metric", "found to differ", "of"]]
        rows += [[_UNITS[name], str(count), str(a_a["num_splits"])] for name, count in a_a["false_alarms"].items()]
        yield (
            "A/A",
            rows,
            [
                (
                    f"Random halves of {a_a['variant']}'s users, with {a_a['num_looks']} looks each; 5 % of them may "
                    "differ by chance."
                )
            ],
        )
    if "off_policy" in report:
        yield _off_policy(report["off_policy"])


def _compared(report: Mapping[str, Any]) -> Iterator[tuple[str, list[Row], list[str]]]:
    days, mismatch = report["days"], report["mismatch"]
    head = ["variant", "users", "lists", *_UNITS.values(), "tiers"]
    rows: list[Row] = [
        [
            variant["variant"],
            f"{variant['num_users']:,}",
            f"{variant['num_impressions']:,}",
            *(_number(variant[name]) for name in _UNITS),
            " ".join(
                f"{tier} {share:.0%}" for tier, share in sorted(variant["tiers"].items(), key=lambda pair: -pair[1])
            ),
        ]
        for variant in report["variants"]
    ]
    warning = (
        (
            f"Sample-ratio mismatch: {_counts(mismatch)} (p = {mismatch['p_value']:.2g}). Trust no difference before "
            "the cause is known."
        )
        if mismatch["is_mismatch"]
        else f"Users are divided as they should be: {_counts(mismatch)} (p = {mismatch['p_value']:.2g})."
    )
    yield f"Variants, {days[0]} to {days[-1]}", [head, *rows], [warning, *(f"{note}." for note in report["notes"])]
    rows = [["metric", "variant", f"less {report['control']}", "95 % interval, at any look", "as a share", "p"]]
    rows += [
        [_UNITS[difference["metric"]], difference["variant"], *_cells(difference)]
        for difference in report["differences"]
    ]
    yield _DIFFERENCES, rows, []
    if report["segments"]:
        rows = [["segment", "variant", "users", f"clicks less {report['control']}", "95 % interval", "p by Holm"]]
        for segment in report["segments"]:
            estimate, between = _signed(segment["estimate"]), _between(segment)
            rows.append(
                [
                    segment["segment"],
                    segment["variant"],
                    f"{segment['num_users']:,}",
                    estimate,
                    between,
                    f"{segment['holm_p_value']:.2g}",
                ]
            )
        yield (
            "Segments",
            rows,
            [f"p-values are corrected for {len(report['segments'])} tests by Holm's method; intervals are not."],
        )


def _off_policy(about: Mapping[str, Any]) -> tuple[str, list[Row], list[str]]:
    sentences = [f"Refused: {about['refusal']}."] if about["refusal"] else []
    rows: list[Row] = [["estimate", "a list", "95 % interval"]]
    for name, label in (
        ("logged", "what was logged"),
        ("ips", "policy, IPS"),
        ("snips", "policy, SNIPS"),
        ("doubly_robust", "policy, doubly robust"),
        ("support", "support: the mean weight"),
    ):
        if estimate := about[name]:
            rows.append(
                [label, _number(estimate["value"]), f"{_number(estimate['low'])} to {_number(estimate['high'])}"]
            )
    if about["effective_lists"] is not None:
        sentences.append(
            f"{about['num_lists']:,} lists of {about['num_users']:,} users count as {about['effective_lists']:,.0f}."
        )
    return "Off-policy", rows if len(rows) > 1 else [], sentences


def _counts(mismatch: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {count:,} (aim {mismatch['shares'][name]:.1%})" for name, count in mismatch["users"].items()
    )


def _cells(difference: Mapping[str, Any]) -> list[str]:
    share = (
        "-"
        if difference["estimate_share"] is None
        else f"{difference['estimate_share']:+.1%} ({difference['low_share']:+.1%} to {difference['high_share']:+.1%})"
    )
    return [_signed(difference["estimate"]), _between(difference), share, f"{difference['p_value']:.2g}"]


def _between(difference: Mapping[str, Any]) -> str:
    return (
        "too few users"
        if difference["low"] is None
        else f"{_signed(difference['low'])} to {_signed(difference['high'])}"
    )


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return a table's rows with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
