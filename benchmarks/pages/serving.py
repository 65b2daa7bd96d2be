"""Tables of the serving benchmarks: latency, events, rules, overload, size, faults, releases, soak."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.pages.table import middle_and_tail, optional, outcome, percent, result, table

_TIERS = ("noop", "student", "popular", "precomputed", "llm")
_HIDES = {
    "hide": "all parts running",
    "hide_redis_kill": "Redis killed",
    "hide_worker_takeover": "stream worker killed",
}
_LEAST_OVERLOAD = 2
_MACHINES = (
    "setting",
    "door",
    "% within 50 ms",
    "CPU ms",
    "capacity/s",
    "goodput of peak at 2 / 5 / 10",
    "answers p99 ms",
    "refusals p99 ms",
    "% in time 5 s after",
    "cost of a refusal",
    "generator, cores",
)
_SHOWN_MULTIPLES = (1, 2, 5, 10)


def latency() -> Iterator[str]:
    """One row per tier: both doors, and the lower of their fractions in time."""
    cases = {(case["tier"], case["door"]): case for case in result("serve")["cases"]}
    rows = []
    for tier in _TIERS:
        doors = [cases[tier, door] for door in ("rest", "grpc")]
        met = percent(min(case["deadline_met"] for case in doors))
        rows.append((tier, *(middle_and_tail(case, 1) for case in doors), met))
    return table(("tier", "REST p50 / p99 ms", "gRPC p50 / p99 ms", "% within 50 ms"), rows)


def in_time() -> tuple[int, float]:
    """Return the number of requests to tiers, and the fraction answered in time."""
    cases = [case for case in result("serve")["cases"] if case["tier"] != "noop"]
    num = sum(case["num_requests"] for case in cases)
    return num, sum(case["num_requests"] * case["deadline_met"] for case in cases) / num


def lists() -> Iterator[str]:
    """One row per kind of call, and the cost of batches."""
    run = result("lists")
    rows = [(row["kind"], f"{row['p50_ms']:.1f}", f"{row['p50_over_popular_tier']:.2f}") for row in run["latency"]]
    yield from table(("call", "p50 ms", "over the popular tier"), rows)
    cost = {row["kind"]: row["answers_per_core_s"] for row in run["cost"]}
    yield ""
    yield (
        f"Lists per second of processor time: {cost['single']:,.0f} by single calls, "
        f"{cost['batch']:,.0f} by calls of 50 users, {cost['command']:,.0f} by `tailrace recommend`."
    )


def events() -> Iterator[str]:
    """Freshness, erasure and hidden items: time from the acknowledgement until answers agree."""
    fresh, erasure = result("freshness"), result("erasures")
    single, many = erasure["one"], erasure["many"]
    rows = [
        ("event visible in `Recommend`", f"{fresh['num_events']}", middle_and_tail(fresh), "-"),
        *_after_quiet(fresh.get("after_quiet_ms", [])),
        ("user erased from answers", f"{single['num_erasures']}", middle_and_tail(single), "-"),
    ]
    for key, condition in _HIDES.items():
        hide = result("hides")[key]
        late = f"{hide['num_shown_after_1s']} of {hide['num_answers']:,}"
        rows.append((f"hidden item, {condition}", f"{hide['num_changes']:,}", middle_and_tail(hide), late))
    yield from table(("change", "number", "p50 / p99 ms", "answers wrong after 1 s"), rows)
    yield ""
    yield (
        f"{many['num_users']:,} erasures at once: accepted in {many['accepted_s']:.0f} s, "
        f"out of all answers {many['online_s']:.0f} s later, out of every file after {many['all_s']:.0f} s."
    )


def _after_quiet(quiet_ms: list[float]) -> list[tuple[str, str, str, str]]:
    """Return the row of single events, with the middle and the largest time."""
    if not quiet_ms:
        return []
    middle_ms = sorted(quiet_ms)[len(quiet_ms) // 2]
    return [("the first after a quiet minute", f"{len(quiet_ms)}", f"{middle_ms:.0f} / {max(quiet_ms):.0f}", "-")]


def rules() -> Iterator[str]:
    """One row per tier: plain requests against rules by surface and in the body."""
    ratios = ("surface_over_plain_p50", "body_over_plain_p50")
    rows = [
        (row["tier"], f"{row['plain_p50_ms']:.1f}", *(f"{row[name]:.2f}" for name in ratios))
        for row in result("rules")["requests"]
    ]
    return table(("tier", "plain p50 ms", "rules by surface, ratio", "rules in the body, ratio"), rows)


def live_catalogue() -> Iterator[str]:
    """The cost of a million item states and of expressions over them."""
    size, expressions, stage = result("item-states"), result("rules")["expressions"], result("rules")["stage"]
    rows = [
        ("memory of 1,000,000 item states, MB", f"{size['memory_mb']:.0f}"),
        ("start from snapshot and topic, s of processor time", f"{size['start_cpu_s']:.1f}"),
        (
            "masks and selection, ms with / without item states",
            f"{size['request_with_ms']:.2f} / {size['request_without_ms']:.2f}",
        ),
        ("new expression over 1,000,000 items, ms", f"{expressions['compile_p50_ms']:.0f}"),
        (
            "cached expression / update after one item, µs",
            f"{1e3 * expressions['kept_ms']:.0f} / {1e3 * expressions['after_a_change_ms']:.0f}",
        ),
        (
            "selection of 200 candidates, ms without / with six rules",
            f"{stage['choose_ms']:.2f} / {stage['choose_and_rules_ms']:.2f}",
        ),
    ]
    return table(("figure", "value"), rows)


def overload() -> Iterator[str]:
    """One row per door and multiple of capacity, with high, normal and low priority in a cell."""
    cases: dict[tuple[str, float, bool], list[dict[str, Any]]] = {}
    for row in result("overload")["rows"]:
        if row["is_after_overload"] or row["multiple"] in _SHOWN_MULTIPLES:
            cases.setdefault((row["door"], row["multiple"], row["is_after_overload"]), []).append(row)
    rows = []
    for (door, multiple, is_after), priorities in cases.items():
        cells = (
            " / ".join(optional(row[name], ".0f") for row in priorities)
            for name in ("goodput_rps", "answered_p99_ms", "refused_p99_ms")
        )
        name = f"{multiple:g}, 5 s after" if is_after else f"{multiple:g}"
        rows.append((door, name, f"{priorities[0]['rate_rps']:.0f}", *cells))
    return table(("door", "multiple", "sent/s", "in time/s", "answers p99 ms", "refusals p99 ms"), rows)


def machines() -> Iterator[str]:
    """One row per setting and door."""
    doors: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result("machines")["rows"]:
        doors.setdefault((row["setting"], row["door"]), []).append(row)
    rows = []
    for (setting, door), (short, *loads) in doors.items():
        *crowded, after = loads
        costs = [row["refusal_cost"] for row in crowded if row["refusal_cost"] is not None]
        rows.append(
            (
                setting,
                door,
                percent(short["deadline_met"]),
                f"{short['cpu_ms']:.1f}",
                f"{loads[0]['capacity_rps']:.0f}",
                " / ".join(f"{row['goodput_of_peak']:.2f}" for row in crowded if row["multiple"] >= _LEAST_OVERLOAD),
                *(_worst(crowded, name) for name in ("answered_p99_ms", "refused_p99_ms")),
                percent(after["deadline_met"], 1),
                optional(max(costs, default=None), ".2f"),
                f"{max(row['generator_cpu_share'] for row in loads):.2f}",
            )
        )
    yield from table(_MACHINES, rows)


def slower_machines() -> list[tuple[str, str]]:
    """Return the README's row of the slower settings: the worse door of each."""
    met: dict[str, float] = {}
    for row in result("machines")["rows"]:
        if row["kind"] == "deadline":
            met[row["setting"]] = min(met.get(row["setting"], 1.0), row["deadline_met"])
    return [("the same on one core / beside busy processes", f"{percent(met['one core'])} / {percent(met['hogs'])} %")]


def _worst(rows: list[dict[str, Any]], name: str) -> str:
    return optional(max((row[name] for row in rows if row[name] is not None), default=None), ".0f")


def scale() -> Iterator[str]:
    """The smallest and the largest size of each axis."""
    axes: dict[str, list[dict[str, Any]]] = {}
    for row in result("scale")["rows"]:
        axes.setdefault(row["axis"], []).append(row)
    names = ("loop_ms", "p99_ms", "rss_mb", "freshness_p99_ms", "restart_s")
    rows = [
        (
            axis,
            f"{row['size']:,}",
            *(optional(row[name], ".3g" if row[name] is not None and row[name] < 1_000 else ",.0f") for name in names),
        )
        for axis, points in axes.items()
        for row in (points[0], points[-1])
    ]
    yield from table(("axis", "size", "CPU ms", "p99 ms", "memory MB", "freshness p99 ms", "restart s"), rows)
    largest = axes["items"][-1]
    yield ""
    yield (
        f"The student's ranking over {largest['size']:,} items: {largest['student_ms']:.1f} ms, "
        f"{largest['student_mb']:.0f} MB, {largest['recall']:.1%} of the exact top ten."
    )


def pipeline() -> Iterator[str]:
    """Processor seconds and peak memory of each stage, for three sizes."""
    rows = result("pipeline")["rows"]
    stages = tuple(dict.fromkeys(row["stage"] for row in rows))
    sizes = list(dict.fromkeys((row["events"], row["items"]) for row in rows))
    costs = {
        (row["events"], row["items"], row["stage"]): f"{float(format(row['cpu_s'], '.3g')):,g} / {row['rss_mb']:,}"
        for row in rows
        if row["cpu_s"] is not None
    }
    lines = [
        (f"{num:,}", f"{items:,}", *(costs.get((num, items, stage), "-") for stage in stages))
        for num, items in (sizes[0], sizes[len(sizes) // 2], sizes[-1])
    ]
    return table(("events", "items", *stages), lines)


def faults_of_peers() -> Iterator[str]:
    """One row per fault of another server that ranks and writes."""
    rows = []
    for row in result("faults-peers")["rows"]:
        text = row["text"]
        shares = " / ".join(percent(text[kind] / text["asked"]) for kind in ("lists", "in_time"))
        recovered = (optional(seconds, ".1f") for seconds in (row["recovery_s"], text["recovered_s"]))
        rows.append((row["fault"], *outcome(row), shares, " / ".join(recovered)))
    head = ("fault", "% answered", "% in time", "p99 ms")
    return table((*head, "with a text: % answered / in time", "lists / text recovered after s"), rows)


def _fault_rows(name: str) -> Iterator[str]:
    """One row per fault: of one machine, of a machine of about a third of the speed, of a model on two processes."""
    rows = [(row["fault"], *outcome(row), optional(row["recovery_s"], ".1f")) for row in result(name)["rows"]]
    return table(("fault", "% answered", "% in time", "p99 ms", "recovered after s"), rows)


faults = partial(_fault_rows, "faults")
faults_slow = partial(_fault_rows, "faults-slow")
faults_of_ranks = partial(_fault_rows, "faults-ranks")


def idle() -> Iterator[str]:
    """Processor time without requests, by part."""
    read = result("idle")
    parts = sorted(read["cores"].items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {cores:.3f}" for name, cores in parts if cores >= 0.01)
    yield f"Without requests the embedded stack uses {read['cores_in_all']:.2f} of a slow core: {shares}."


def node_faults() -> Iterator[str]:
    """The worst values over all faults of a cluster of three nodes."""
    rows = result("faults-nodes")["rows"]
    answered, met = (min(row[name] for row in rows) for name in ("availability", "deadline_met"))
    late, slow = max(row["p99_ms"] for row in rows), max(row["recovery_s"] for row in rows)
    yield (
        f"Over {len(rows)} faults of a head and two nodes at least {percent(answered)} % of requests were answered and "
        f"{percent(met)} % in time; the largest p99 was {late:.0f} ms, the slowest recovery {slow:.1f} s."
    )


def spike() -> Iterator[str]:
    """The callers of the low-priority spike, by priority."""
    (row,) = (row for row in result("faults")["rows"] if "low" in row["by_priority"])
    parts = row["by_priority"] | row["by_door"]
    rows = [(name, f"{part['num_requests']:,}", *outcome(part)) for name, part in parts.items()]
    return table(("callers", "requests", "% answered", "% in time", "p99 ms"), rows)


def releases() -> Iterator[str]:
    """One row per candidate release."""
    rows = [
        (
            case["name"],
            optional(case.get("rolled_back_after_s"), ".0f"),
            optional(case.get("live_after_s"), ".0f"),
            f"{case['num_lost']} of {case['num_requests']:,}",
        )
        for case in result("release")["cases"]
    ]
    return table(("candidate", "rolled back after s", "promoted after s", "lost requests"), rows)


def soak() -> Iterator[str]:
    """One row per kind of request, and the accounts of events and explanations."""
    run = result("soak")
    rows = [(row["row"], f"{row['num_requests']:,}", *outcome(row)) for row in run["doors"]]
    yield from table(("requests", "number", "% answered", "% in time", "p99 ms"), rows)
    events_, explained = run["events"], run["explained"]
    broken = ", ".join(f"{row['part']} {row['quantity']}" for row in run["growth"] if row["verdict"] == "broken")
    yield ""
    yield (
        f"Of {events_['num_acknowledged']:,} acknowledged events {events_['num_lost']} were lost and "
        f"{events_['num_doubled']} counted twice. Of {explained['asked']:,} explanations {len(explained['different'])} "
        f"differed; {explained['missing_in_faults']} were lost during faults of the store. "
        f"Growth above its bound: {broken or 'none'}."
    )
