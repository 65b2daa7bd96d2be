"""Tables of many model names and of tenants."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.pages.table import optional, percent, result, table


def many_gateway() -> Iterator[str]:
    """One gateway with room for some of many names: starts, latency, first calls, memory over loads and unloads."""
    rows = {row["row"]: row for row in result("many")["rows"] if row["part"] == "gateway" and "fault" not in row}
    start, warm, zipf, first, memory = (rows[name] for name in ("start", "warm", "zipf", "first calls", "cycles"))
    return table(
        ("figure", "value"),
        [
            (f"start with {start['names']:,} names, one", f"{start['start_s']:.2f}, {start['one_start_s']:.2f} s"),
            ("p99 of names in memory, of one name", f"{warm['warm_p99_ms']:.0f}, {warm['one_p99_ms']:.0f} ms"),
            *((("cores that loads took meanwhile", f"{cores:.2f}"),) if (cores := warm.get("loading_cores")) else ()),
            ("all requests: answered, in time", _answered(zipf)),
            (f"{first['calls']} first calls without manifest", _first_calls(first)),
            (f"memory after {memory['evictions']:,} loads and unloads", f"{memory['growth']:+.1%}"),
        ],
    )


def many_faults() -> Iterator[str]:
    """The same gateway in each fault of the store."""
    rows = [
        (
            row["fault"],
            f"{row['warm_p99_ms']:.0f} ms",
            _answered(row),
            _first_calls(row["first_calls"]),
            f"{row['start_s']:.1f}, {row['one_start_s']:.1f} s",
            f"{row['back_s']:.1f} s" if row["loads_after"] else "never",
            f"{row['growth']:+.1%}",
        )
        for row in result("many")["rows"]
        if row["part"] == "gateway" and "fault" in row
    ]
    head = ("fault", "p99 in memory", "cold names", "100 first calls", "start", "loaded after it", "memory")
    return table(head, rows)


def many_replicas() -> Iterator[str]:
    """Two LLM replicas in each fault: seconds, and requests without an answer."""
    rows: dict[str, dict[str, Any]] = {}
    for row in result("many")["rows"]:
        if row["part"] == "replicas" and "fault" in row:
            rows.setdefault(row["fault"], {})[row["row"].rpartition(" ")[2]] = row
    if not rows:
        return
    cells = [
        (
            fault,
            *(f"{optional(parts.get('hot', {}).get(key), '.1f')} s" for key in ("two_replicas_s", "one_holder_s")),
            *(f"{optional(parts.get(name, {}).get('ranked_s'), '.0f')} s" for name in ("killed", "restarted")),
            str(sum(part["unanswered"] for part in parts.values())),
        )
        for fault, parts in rows.items()
    ]
    head = ("fault", "hot: on 2 after", "back on 1", "SIGKILL", "rolling restart", "unanswered")
    yield from table(head, cells)
    first, memory = (
        next(row for row in result("many")["rows"] if row["row"] == f"replicas, {name}")
        for name in ("first calls", "cycles")
    )
    yield ""
    yield (
        f"{first['calls']} first calls: {', '.join(map(str, first['loads']))} load by replica. "
        f"{memory['evictions']:,} loads and unloads under load: {memory['unanswered']} unanswered, "
        f"{max(memory['rankings_by_name'])} ranking by name, memory {memory['growth']:+.1%}."
    )


def _answered(row: dict[str, Any]) -> str:
    return f"{row['answered']:.1%}, {row['in_time']:.1%}"


def _first_calls(row: dict[str, Any]) -> str:
    return f"{row['loads']} load, {_answered(row)}"


def tenants() -> Iterator[str]:
    """Tenant b at 0.8 of its share, beside tenant a: latency, and answers in time and in full."""
    run, rows = result("tenants"), []
    for times in sorted({row["times_share"] for row in run["rows"]}):
        case = [row for row in run["rows"] if row["times_share"] == times]
        b, a = ([row for row in case if row["tenant"] == tenant] for tenant in "ba")
        p50, p99 = (sorted(row[name] for row in b)[len(b) // 2] for name in ("p50_ms", "p99_ms"))
        beside = f"a at {times:g} x its share" if a else "alone"
        rows.append((beside, f"{p50:.1f} / {p99:.1f}", _in_full(b), _in_full(a) if a else "-"))
    yield from table(("b beside", "p50 / p99 ms", "% in full", "% of a"), rows)


def _in_full(rows: Sequence[dict[str, Any]]) -> str:
    """Return the requests of several rows that were answered in time and ranked in full, in per cent."""
    total = sum(row["num_requests"] for row in rows)
    return percent(sum(row["full"] * row["num_requests"] for row in rows) / total)
