"""Tables of many model names and of tenants."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.pages.table import figures, result, table

_ANSWERED = "{answered:.1%}, {in_time:.1%}"
_FIRST_CALLS = "{first_calls[loads]} load, {first_calls[answered]:.1%}, {first_calls[in_time]:.1%}"
_IMPORT = (
    "import of {import[items]:,} items: CPU, p99 before, meanwhile | {import[cpu_s]:.0f} s, "
    "{import[p99_ms_before]:.0f}, {import[p99_ms]:.0f} ms"
)
_DELETION = (
    "deletion of a tenant: places of its ids before, after, in topics and audit | "
    "{deletion[places]}, {deletion[left]}, {deletion[kept]} in {deletion[deletion_s]:.0f} s"
)


def _rows(*parts: str, in_faults: bool) -> list[dict[str, Any]]:
    return [row for row in result("many")["rows"] if row["part"] in parts and ("fault" in row) is in_faults]


def many_gateway() -> Iterator[str]:
    """One gateway with room for some of many names: starts, latency, first calls, memory over loads and unloads."""
    rows = {row["row"]: row for row in _rows("warm", "import", "gateway", "deletion", in_faults=False)}
    ratios = ", ".join(f"{row['p99_to_one']:.2f}" for row in rows["warm"]["rounds"])
    return figures(
        rows["zipf"] | {"first_calls": rows["first calls"], "ratios": ratios, **rows},
        "start with {start[names]:,} names, one | {start[start_s]:.2f}, {start[one_start_s]:.2f} s",
        "p99 of names in memory, of one name | {warm[warm_p99_ms]:.1f}, {warm[one_p99_ms]:.1f} ms",
        "their ratio in each round | {ratios}",
        "all requests: answered, in time | " + _ANSWERED,
        "{first_calls[calls]} first calls without manifest | " + _FIRST_CALLS,
        "memory after {cycles[evictions]:,} loads and unloads | {cycles[growth]:+.1%}",
        *([_IMPORT] if "import" in rows else []),
        *([_DELETION] if "deletion" in rows else []),
    )


def many_faults() -> Iterator[str]:
    """The same gateway in each fault of the store."""
    rows = _rows("gateway", in_faults=True)
    return table(
        "fault | p99 in memory | cold names | 100 first calls | start | loaded after it | memory",
        "{fault} | {warm_p99_ms:.0f} ms | "
        + _ANSWERED
        + " | "
        + _FIRST_CALLS
        + " | {start_s:.1f}, {one_start_s:.1f} s | "
        "{loaded} | {growth:+.1%}",
        [row | {"loaded": f"{row['back_s']:.1f} s" if row["loads_after"] else "never"} for row in rows],
    )


def many_replicas() -> Iterator[str]:
    """Two LLM replicas in each fault: seconds, and requests without an answer."""
    rows: dict[str, dict[str, Any]] = {}
    for row in _rows("replicas", in_faults=True):
        parts = rows.setdefault(row["fault"], {"fault": row["fault"], "unanswered": 0})
        parts[row["row"].rpartition(" ")[2]] = row
        parts["unanswered"] += row["unanswered"]
    if not rows:
        return
    yield from table(
        "fault | hot: on 2 after | back on 1 | SIGKILL | rolling restart | unanswered",
        "{fault} | {hot[two_replicas_s]:.1f} s | {hot[one_holder_s]:.1f} s | {killed[ranked_s]:.0f} s | "
        "{restarted[ranked_s]:.0f} s | {unanswered}",
        rows.values(),
    )
    healthy = {row["row"]: row for row in result("many")["rows"]}
    first, memory = (healthy[f"replicas, {name}"] for name in ("first calls", "cycles"))
    yield ""
    yield (
        f"{first['calls']} first calls: {', '.join(map(str, first['loads']))} load by replica. "
        f"{memory['evictions']:,} loads and unloads under load: {memory['unanswered']} unanswered, "
        f"{max(memory['rankings_by_name'])} ranking by name, memory {memory['growth']:+.1%}."
    )


def tenants() -> Iterator[str]:
    """Tenant b at 0.8 of its share, beside tenant a: latency, and answers in time and in full."""
    run, rows = result("tenants"), []
    for times in sorted({row["times_share"] for row in run["rows"]}):
        case = [row for row in run["rows"] if row["times_share"] == times]
        b, a = ([row for row in case if row["tenant"] == tenant] for tenant in "ba")
        medians = {name: sorted(row[name] for row in b)[len(b) // 2] for name in ("p50_ms", "p99_ms")}
        beside = f"a at {times:g} x its share" if a else "alone"
        rows.append({"beside": beside, "b": _in_full(b), "a": _in_full(a) if a else None} | medians)
    columns = "{beside} | {p50_ms:.1f} / {p99_ms:.1f} | {b:%2} | {a:%2}"
    return table("b beside | p50 / p99 ms | % in full | % of a", columns, rows)


def _in_full(rows: Sequence[dict[str, Any]]) -> float:
    """Return the fraction of the requests of several rows that were answered in time and ranked in full."""
    return float(sum(row["full"] * row["num_requests"] for row in rows) / sum(row["num_requests"] for row in rows))
