"""Writes report.md of a bundle, or of rejected models: purpose, quality, gain of the LLM, data, and lineage.

All of its content comes from the manifest and the evaluation report, so that anyone with the bundle can check it. Plots
are text: one width fits a terminal, a code review and a rendered page.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipelines.evaluation.gain import MIN_CASES, weigh
from pipelines.scoring.mixed import describe_sources
from pipelines.training.planned_memory import describe_memory
from pipelines.training.train_student import describe_earned
from pipelines.wishes.make_reader import describe as describe_reader

CARD = "report.md"
_WIDTH = 40


def render(version: str, manifest: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Return the page of this bundle. `manifest` lacks version and hashes."""
    forced = manifest["forced"]
    limits = [f"- It was published by force although: {'; '.join(forced)}."] if forced else []
    begin = [_card(f"Bundle {version}", manifest, report, limits), _weights(report["refit"])]
    return _page(begin, manifest, report, forced)


def write_refusal(
    manifest: Mapping[str, Any],
    report: Mapping[str, Any],
    problems: Sequence[str],
    next_steps: Sequence[str],
    out: Path,
) -> None:
    """Write report.md on rejected models, with reasons and fixes, and report.json with the same under `gate`."""
    lists = [
        "\n\n".join([f"## {head}", "\n".join(f"- {sentence}." for sentence in sentences)])
        for head, sentences in (("Why", problems), ("Next steps", next_steps))
        if sentences
    ]
    refused = "# Not published: the gate rejected these models"
    page = _page([refused, *lists, _card("The models", manifest, report, [], level=2)], manifest, report, problems)
    (out / CARD).write_text(page)
    rows = {name: manifest[name] for name in ("against_live", "against_reference")}
    gate = {"problems": problems, "next_steps": next_steps, **rows}
    (out / "report.json").write_text(json.dumps({**report, "gate": gate}, indent=1))


def _page(begin: Sequence[str], manifest: Mapping[str, Any], report: Mapping[str, Any], problems: Sequence[str]) -> str:
    """Return a page: the given opening, then the sections shared by bundles and rejected models."""
    sections = (
        *begin,
        _quality(report),
        _lists(report["metrics"]),
        _gain(report["gain"], manifest["llm_price_ndcg_per_ms"]),
        _against_live(manifest["against_live"], manifest.get("withdrawn")),
        _against_reference(manifest["against_reference"], manifest["about_reference"]),
        _data(manifest["data"], problems),
        _test_set(manifest["test_set"], report),
        _lineage(manifest["lineage"]),
    )
    return "\n\n".join(sections) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def interval_plot(rows: Sequence[tuple[str, float, float, float]], *, zero: bool = False) -> str:
    """Return a fenced plot of (name, low, mean, high) rows on one scale: `--o--`, and `|` at 0. `zero` includes 0."""
    ends = [value for _, low, _, high in rows for value in (low, high)] + [0.0] * zero
    first, last = min(ends), max(ends)
    step = (last - first) / (_WIDTH - 1) or 1.0

    def place(value: float) -> int:
        return min(_WIDTH - 1, max(0, round((value - first) / step)))

    indent = max(len(name) for name, *_ in rows)
    lines = []
    for name, low, mean, high in rows:
        marks = [" "] * _WIDTH
        marks[place(low) : place(high) + 1] = "-" * (place(high) + 1 - place(low))
        if zero:
            marks[place(0.0)] = "|"
        marks[place(mean)] = "o"
        lines.append(f"{name:<{indent}}  {''.join(marks)}  {mean:{'+' if zero else ''}.4f}")
    return "\n".join(["```text", *lines, f"{'':<{indent}}  {first:<{_WIDTH // 2}.4f}{last:>{_WIDTH // 2}.4f}", "```"])


def _card(
    title: str, manifest: Mapping[str, Any], report: Mapping[str, Any], limits: Sequence[str], level: int = 1
) -> str:
    data, shown = manifest["data"], manifest["repeats"]
    newest = datetime.fromtimestamp(data["newest_event_us"] / 1e6, UTC)
    facts = (
        ("models", "a decoder that ranks items for a user from the user's history, and a small student"),
        ("intended use", f"the next item for users like the users of `{manifest['dataset']}`"),
        ("training data", f"{data['num_events']} events of {data['num_users']} users on {manifest['num_items']} items"),
        ("newest event", f"{newest:%Y-%m-%d %H:%M} UTC"),
        ("seen items", "learned and recommended" if shown else "excluded unless a request asks for them"),
        ("decoder", f"{manifest['num_parameters']:,} parameters, codes of depth {manifest['depth']}"),
        ("student", describe_earned(manifest["distillation"])),
        ("sources", describe_sources(report["mixer"])),
        *_training(manifest),
        *((("wishes", describe_reader(manifest["wishes"])),) if "wishes" in manifest else ()),
        ("work of one ranking", ", ".join(f"{name} {num:,}" for name, num in manifest["multiply_adds"].items())),
        ("random seed", manifest["lineage"]["seed"]),
    )
    all_limits = [*_limits(manifest, report), *limits]
    return "\n".join([f"{'#' * level} {title}", "", table(("", ""), facts), "", "Limits:", *all_limits])


def _training(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows on the decoder's training, or on the import of a decoder that was trained elsewhere."""
    imported = manifest.get("imported")
    if imported is None:
        training = manifest["training"]
        return [
            ("training of the decoder", _speed(training)),
            ("memory of its steps", describe_memory(training["memory"])),
        ]
    seen = imported["seen_until"]
    labels = f"labels until {seen} are not judged" if seen else "may have seen its labels: routed to by setting only"
    search = manifest["search"]
    return [
        ("decoder imported from", f"{imported['framework']}, sha256 {imported['source_sha256'][:12]}; {labels}"),
        ("search", f"{search['beam_width']} beams, scores over the {search['scores']}"),
    ]


def _speed(training: Mapping[str, Any]) -> str:
    share = "" if training["mfu"] is None else f", {training['mfu']:.1%} of the device's peak (MFU)"
    return (
        f"{training['num_tokens']:,} tokens, {training['tokens_per_s']:,.0f} a second, "
        f"{training['flops_per_s'] / 1e9:,.1f} GFLOP/s{share}"
    )


def _limits(manifest: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    lines = [
        "- Quality is measured on past behaviour: the user's next item was in the list, for whatever reason.",
        f"- It was measured on {report['num_test_users']} users with enough events, not on visitors without history.",
    ]
    if manifest["depth"] == 1:
        lines.append(
            "- Until the next training, an item without training events is ranked only by its text, and only if rows "
            "were learned from text (a recipe's `text_size`)."
        )
    served = report.get("student_serving", {})
    if "num_scored" in served:
        lines.append(
            f"- The student scores {served['num_scored']:,} items near the user's history and finds "
            f"{served['recall@10']:.1%} of its ten best items."
        )
    small = [row["slice"] for row in report["gain"] if row["num_cases"] < MIN_CASES]
    if small:
        lines.append(f"- Slices of fewer than {MIN_CASES} test users prove nothing: {', '.join(small)}.")
    return lines


def _weights(refit: Mapping[str, Any] | None) -> str:
    if refit is None:
        return "## Weights\n\nThe served weights are the weights that the gate judged."
    rows = [
        (name, f"{row['newest_ndcg_judged']:.4f}", f"{row['newest_ndcg']:.4f}", f"{row['in_common']:.0%}")
        for name, row in refit["models"].items()
    ]
    words = (
        f"All quality on this page is that of the pair in `judged/`, which learned {refit['num_events_judged']:,} "
        f"events and no label that judged it. After the gate, training continued on all {refit['num_events']:,} "
        "events, which leaves no label to judge the served pair. It is compared with the judged pair instead: it "
        "must predict users' newest events better, and its lists of ten must have at least "
        f"{refit['least_in_common']:.0%} in common with that pair's."
    )
    heads = ("model", "newest events' NDCG@10, judged", "serving", "lists in common")
    return "\n\n".join(["## Weights", words, table(heads, rows)])


def _quality(report: Mapping[str, Any]) -> str:
    metrics = report["metrics"]
    rows = [
        (name, f"{figures['ndcg@10']:.4f}", _interval(figures["ndcg@10_interval"]), f"{figures['hr@10']:.4f}")
        for name, figures in metrics.items()
    ]
    plotted = [
        (name, figures["ndcg@10_interval"][0], figures["ndcg@10"], figures["ndcg@10_interval"][1])
        for name, figures in metrics.items()
    ]
    share = f"The student keeps {report['student_share']:.1%} of the decoder's NDCG@10."
    heads = ("model", "NDCG@10", "95 %", "HR@10")
    return "\n\n".join(
        ["## Quality", f"Protocol: {report['protocol']}.", table(heads, rows), interval_plot(plotted), share]
    )


def _lists(metrics: Mapping[str, Any]) -> str:
    shelves = list(next(iter(metrics.values()))["shares"]["lists"])
    histories = next(iter(metrics.values()))["shares"]["histories"]
    rows: list[Sequence[object]] = [("(histories)", "", "", *(f"{histories[name]:.0%}" for name in shelves))]
    for model, figures in metrics.items():
        calibration = f"{figures['calibration@10']:.2f} {_interval(figures['calibration@10_interval'], 2)}"
        shares = [f"{figures['shares']['lists'][name]:.0%}" for name in shelves]
        rows.append((model, f"{figures['coverage@10']:.1%}", calibration, *shares))
    words = (
        "Lists of ten: the fraction of the catalogue in them, the distance of their mix from that of their users' "
        "histories (0: equal), and the mix."
    )
    return "\n\n".join(["## What lists hold", words, table(("model", "coverage", "calibration", *shelves), rows)])


def _gain(gain: Sequence[Mapping[str, Any]], price_ndcg_per_ms: float) -> str:
    rows = [
        (
            row["slice"],
            row["num_cases"],
            f"{row['llm_ndcg']:.4f}",
            f"{row['student_ndcg']:.4f}",
            f"{row['llm_minus_student']:+.4f}",
            _interval((row["low"], row["high"])),
        )
        for row in gain
    ]
    enough = [row for row in gain if row["num_cases"] >= MIN_CASES] or gain
    plot = interval_plot(
        [(row["slice"], row["low"], row["llm_minus_student"], row["high"]) for row in enough], zero=True
    )
    heads = ("slice", "test users", "decoder", "student", "difference", "95 %")
    weighed = weigh(gain, price_ndcg_per_ms)
    costs = [
        (
            row["slice"],
            f"{row['decoder_ms']:.2f}",
            _signed(row["valid_net"]),
            _signed(row["net"]),
            "-" if row["p_value"] is None else f"{row['p_value']:.4f}",
        )
        for row in weighed
    ]  # fmt: skip
    called = ", ".join(row["slice"] for row in weighed if row["pays"]) or "no request; the student answers all requests"
    words = (
        f"With `TAILRACE_LLM_ROUTING=gain` the LLM is called for {called}. Net is the difference less "
        f"{price_ndcg_per_ms:g} for each millisecond of the decoder's processor time; validation chooses the slices "
        "with a positive net gain, and test labels judge them: p by Holm's method, at most 0.025."
    )
    cost_heads = ("slice", "decoder ms", "validation, net", "test, net", "p")
    parts = [table(heads, rows), plot, words, table(cost_heads, costs)]
    return "\n\n".join(["## Gain of the decoder over its student, NDCG@10", *parts])


def _against_live(rows: Sequence[Mapping[str, Any]], withdrawn: str | None) -> str:
    begin = [
        "## Against the bundle that was live",
        *([f"{withdrawn}. Compared with the current live bundle:"] if withdrawn else []),
    ]
    if not rows:
        return "\n\n".join([*begin, "No comparison: no bundle of this data was live, or it could not be read."])
    return "\n\n".join([*begin, _compared(rows, "live bundle")])


def _against_reference(rows: Sequence[Mapping[str, Any]], about: str) -> str:
    return "\n\n".join(["## Against the reference", f"{about}.", *([_compared(rows, "reference")] if rows else [])])


def _compared(rows: Sequence[Mapping[str, Any]], other: str) -> str:
    cells = [
        (
            row["model"],
            row["champion"],
            row["num_users"],
            f"{row['champion_ndcg']:.4f}",
            f"{row['challenger_ndcg']:.4f}",
            _interval((row["low"], row["high"])),
        )
        for row in rows
    ]  # fmt: skip
    return table(("model", other, "test users", "its NDCG@10", "now", "difference, 95 %"), cells)


def _data(data: Mapping[str, Any], problems: Sequence[str]) -> str:
    unusable = [
        (f"{name} not used: {reason}", f"{share:.2%}")
        for name, by_reason in data["unusable_shares"].items()
        for reason, share in by_reason.items()
    ]
    drift = [(f"drift of {what} (PSI)", f"{value:.3f}") for what, value in data["drift"].items()]
    rows = [("events since the live bundle's", data["num_new_events"]), *unusable, *drift]
    outcome = "beyond their bounds: " + "; ".join(problems) if problems else "all within their bounds"
    parts = ["## Checks of the data", table(("", ""), rows), f"Gate and checks: {outcome}."]
    if notes := data.get("notes"):
        parts.append("\n".join(f"- {note}." for note in notes))
    return "\n\n".join(parts)


def _test_set(record: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    words = (
        f"{record['num_users']} of {record['num_labelled']} labels (SHA-256 {record['sha256'][:16]}), opened up to "
        f"{record['num_openings']} times in this state folder, {record['mean_openings']:.1f} times on average. The "
        "more models these labels choose, the more of a gain is chance."
    )
    rows = [
        (opening["at"], opening["num_labels"], f"`{opening['command']}`", opening["purpose"])
        for opening in record["openings"]
    ]
    split = report["split"]["kind"]
    return "\n\n".join([f"## Test set ({split})", words, table(("opened", "labels", "by", "for"), rows)])


def _lineage(lineage: Mapping[str, Any]) -> str:
    rows = [
        *((f"data: {name}", f"SHA-256 `{digest}`") for name, digest in lineage["data"].items()),
        ("code", f"sources `{lineage['code']}`"),
        *((f"parent: {name}", parent or "none") for name, parent in lineage["parents"].items()),
        *((f"stage: {name}", f"`{key}`") for name, key in lineage["stages"].items()),
        ("command", f"`{lineage['command']}`"),
    ]
    options = json.dumps(lineage["options"], indent=1, sort_keys=True)
    return "\n\n".join(["## Lineage", table(("", ""), rows), f"Options:\n\n```json\n{options}\n```"])


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"


def _interval(ends: Sequence[float], digits: int = 4) -> str:
    low, high = ends
    return f"[{low:.{digits}f}, {high:.{digits}f}]"
