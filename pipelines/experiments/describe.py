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


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the report as lines of a terminal, about 100 columns wide at most."""
    lines: list[str] = []
    for title, rows, sentences in _parts(found):
        lines += [title, *_columns(rows), *sentences, ""]
    return lines[:-1]


def as_markdown(found: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """Return the report as Markdown; `pictures` are file names by metric, shown next to the differences."""
    blocks = ["# Experiment report"]
    for title, rows, sentences in _parts(found):
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


def _parts(found: Mapping[str, Any]) -> Iterator[tuple[str, list[Row], list[str]]]:
    """Yield the report's parts: title, a table (header first, may be empty), sentences."""
    if "variants" in found:
        yield from _compared(found)
    if "a_a" in found:
        one = found["a_a"]
        rows: list[Row] = [["metric", "found to differ", "of"]]
        rows += [[_UNITS[name], str(count), str(one["num_splits"])] for name, count in one["false_alarms"].items()]
        yield (
            "A/A",
            rows,
            [
                (
                    f"Random halves of {one['variant']}'s users, with {one['num_looks']} looks each; 5 % of them may "
                    "differ by chance."
                )
            ],
        )
    if "off_policy" in found:
        yield _off_policy(found["off_policy"])


def _compared(found: Mapping[str, Any]) -> Iterator[tuple[str, list[Row], list[str]]]:
    days, mismatch = found["days"], found["mismatch"]
    head = ["variant", "users", "lists", *_UNITS.values(), "tiers"]
    rows: list[Row] = [
        [
            one["variant"],
            f"{one['num_users']:,}",
            f"{one['num_impressions']:,}",
            *(_number(one[name]) for name in _UNITS),
            " ".join(f"{tier} {share:.0%}" for tier, share in sorted(one["tiers"].items(), key=lambda pair: -pair[1])),
        ]
        for one in found["variants"]
    ]
    warning = (
        (
            f"Sample-ratio mismatch: {_counts(mismatch)} (p = {mismatch['p_value']:.2g}). Trust no difference before "
            "the cause is known."
        )
        if mismatch["is_mismatch"]
        else f"Users are divided as they should be: {_counts(mismatch)} (p = {mismatch['p_value']:.2g})."
    )
    yield f"Variants, {days[0]} to {days[-1]}", [head, *rows], [warning, *(f"{one}." for one in found["notes"])]
    rows = [["metric", "variant", f"less {found['control']}", "95 % interval, at any look", "as a share", "p"]]
    rows += [[_UNITS[one["metric"]], one["variant"], *_cells(one)] for one in found["differences"]]
    yield _DIFFERENCES, rows, []
    if found["segments"]:
        rows = [["segment", "variant", "users", f"clicks less {found['control']}", "95 % interval", "p by Holm"]]
        for one in found["segments"]:
            estimate, between = _signed(one["estimate"]), _between(one)
            rows.append(
                [
                    one["segment"],
                    one["variant"],
                    f"{one['num_users']:,}",
                    estimate,
                    between,
                    f"{one['holm_p_value']:.2g}",
                ]
            )
        yield (
            "Segments",
            rows,
            [f"p-values are corrected for {len(found['segments'])} tests by Holm's method; intervals are not."],
        )


def _off_policy(found: Mapping[str, Any]) -> tuple[str, list[Row], list[str]]:
    sentences = [f"Refused: {found['refusal']}."] if found["refusal"] else []
    rows: list[Row] = [["estimate", "a list", "95 % interval"]]
    for name, label in (
        ("logged", "what was logged"),
        ("ips", "policy, IPS"),
        ("snips", "policy, SNIPS"),
        ("doubly_robust", "policy, doubly robust"),
        ("support", "support: the mean weight"),
    ):
        if one := found[name]:
            rows.append([label, _number(one["value"]), f"{_number(one['low'])} to {_number(one['high'])}"])
    if found["effective_lists"] is not None:
        sentences.append(
            f"{found['num_lists']:,} lists of {found['num_users']:,} users count as {found['effective_lists']:,.0f}."
        )
    return "Off-policy", rows if len(rows) > 1 else [], sentences


def _counts(mismatch: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {count:,} (aim {mismatch['shares'][name]:.1%})" for name, count in mismatch["users"].items()
    )


def _cells(one: Mapping[str, Any]) -> list[str]:
    share = (
        "-"
        if one["estimate_share"] is None
        else f"{one['estimate_share']:+.1%} ({one['low_share']:+.1%} to {one['high_share']:+.1%})"
    )
    return [_signed(one["estimate"]), _between(one), share, f"{one['p_value']:.2g}"]


def _between(one: Mapping[str, Any]) -> str:
    return "too few users" if one["low"] is None else f"{_signed(one['low'])} to {_signed(one['high'])}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return a table's rows with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
