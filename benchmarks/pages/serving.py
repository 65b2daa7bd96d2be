"""Tables of the serving benchmarks: latency, events, rules, overload, size, faults, releases, soak."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.pages.table import MIDDLE_AND_TAIL, OUTCOME, figures, fill, largest, result, table

_TIERS = ("noop", "student", "popular", "precomputed", "llm")
_HIDES = {
    "hide": "all parts running",
    "hide_redis_kill": "Redis killed",
    "hide_worker_takeover": "stream worker killed",
}
_LEAST_OVERLOAD = 2
_SHOWN_MULTIPLES = (1, 2, 5, 10)


def latency() -> Iterator[str]:
    """One row per tier: both doors, and the lower of their fractions in time."""
    cases = {(case["tier"], case["door"]): case for case in result("serve")["cases"]}
    rows = [{"tier": tier, "rest": cases[tier, "rest"], "grpc": cases[tier, "grpc"]} for tier in _TIERS]
    return table(
        "tier | REST p50 / p99 ms | gRPC p50 / p99 ms | % within 50 ms",
        "{tier} | {rest[p50_ms]:.1f} / {rest[p99_ms]:.1f} | {grpc[p50_ms]:.1f} / {grpc[p99_ms]:.1f} | {met:%2}",
        [row | {"met": min(row[door]["deadline_met"] for door in ("rest", "grpc"))} for row in rows],
    )


def in_time() -> tuple[int, float]:
    """Return the number of requests to tiers, and the fraction answered in time."""
    cases = [case for case in result("serve")["cases"] if case["tier"] != "noop"]
    num = sum(case["num_requests"] for case in cases)
    return num, sum(case["num_requests"] * case["deadline_met"] for case in cases) / num


def lists() -> Iterator[str]:
    """One row per kind of call, and the cost of batches."""
    run = result("lists")
    columns = "{kind} | {p50_ms:.1f} | {p50_over_popular_tier:.2f}"
    yield from table("call | p50 ms | over the popular tier", columns, run["latency"])
    yield ""
    yield fill(
        "Lists per second of processor time: {single:,.0f} by single calls, {batch:,.0f} by calls of 50 users, "
        "{command:,.0f} by `tailrace recommend`.",
        {row["kind"]: row["answers_per_core_s"] for row in run["cost"]},
    )


def events() -> Iterator[str]:
    """Freshness, erasure and hidden items: time from the acknowledgement until answers agree."""
    fresh, erasure, hides = result("freshness"), result("erasures"), result("hides")
    rows = [
        {"change": "event visible in `Recommend`", "number": fresh["num_events"], **fresh},
        *_after_quiet(sorted(fresh.get("after_quiet_ms", []))),
        {"change": "user erased from answers", "number": erasure["one"]["num_erasures"], **erasure["one"]},
    ]
    for key, name in _HIDES.items():
        rows.append({"change": f"hidden item, {name}", "number": hides[key]["num_changes"], **hides[key]})
    late = [fill("{num_shown_after_1s} of {num_answers:,}", row) if "num_answers" in row else "-" for row in rows]
    yield from table(
        "change | number | p50 / p99 ms | answers wrong after 1 s",
        "{change} | {number:,} | " + MIDDLE_AND_TAIL + " | {late}",
        [row | {"late": wrong} for row, wrong in zip(rows, late, strict=True)],
    )
    yield ""
    yield fill(
        "{num_users:,} erasures at once: accepted in {accepted_s:.0f} s, out of all answers {online_s:.0f} s later, "
        "out of every file after {all_s:.0f} s.",
        erasure["many"],
    )


def _after_quiet(quiet_ms: list[float]) -> list[dict[str, Any]]:
    """Return the row of single events, with the middle and the largest time."""
    if not quiet_ms:
        return []
    times_ms = {"p50_ms": quiet_ms[len(quiet_ms) // 2], "p99_ms": quiet_ms[-1]}
    return [{"change": "the first after a quiet minute", "number": len(quiet_ms), **times_ms}]


def rules() -> Iterator[str]:
    """One row per tier: plain requests against rules by surface and in the body."""
    return table(
        "tier | plain p50 ms | rules by surface, ratio | rules in the body, ratio",
        "{tier} | {plain_p50_ms:.1f} | {surface_over_plain_p50:.2f} | {body_over_plain_p50:.2f}",
        result("rules")["requests"],
    )


def live_catalogue() -> Iterator[str]:
    """The cost of a million item states and of expressions over them."""
    expressions = result("rules")["expressions"]
    micros = {name: 1e3 * expressions[f"{name}_ms"] for name in ("kept", "after_a_change")}
    return figures(
        result("item-states") | result("rules") | micros,
        "memory of 1,000,000 item states, MB | {memory_mb:.0f}",
        "start from snapshot and topic, s of processor time | {start_cpu_s:.1f}",
        "masks and selection, ms with / without item states | {request_with_ms:.2f} / {request_without_ms:.2f}",
        "new expression over 1,000,000 items, ms | {expressions[compile_p50_ms]:.0f}",
        "cached expression / update after one item, µs | {kept:.0f} / {after_a_change:.0f}",
        "selection of 200 candidates, ms without / with six rules | "
        "{stage[choose_ms]:.2f} / {stage[choose_and_rules_ms]:.2f}",
    )


def overload() -> Iterator[str]:
    """One row per door and multiple of capacity, with high, normal and low priority in a cell."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    report = result("overload")
    for row in report["rows"]:
        if row["is_after_overload"] or row["multiple"] in _SHOWN_MULTIPLES:
            multiple = f"{row['multiple']:g}" + (", 5 s after" if row["is_after_overload"] else "")
            cases.setdefault((row["door"], multiple), []).append(row)
    names = ("goodput_rps", "answered_p99_ms", "refused_p99_ms")
    return table(
        "door | multiple | sent/s | in time/s | per core left | answers p99 ms | refusals p99 ms",
        "{door} | {multiple} | {rate_rps:.0f} | {goodput_rps} | {per_core} | {answered_p99_ms} | {refused_p99_ms}",
        [
            {"door": door, "multiple": multiple, "rate_rps": own[0]["rate_rps"]}
            | {"per_core": "/".join(f"{goodput_per_core(row, report['machine']['cpus']):.0f}" for row in own)}
            | {name: "/".join(fill(f"{{{name}:.0f}}", row) for row in own) for name in names}
            for (door, multiple), own in cases.items()
        ],
    )


def goodput_per_core(row: Mapping[str, Any], num_cores: int) -> float:
    """Return a row's goodput per core that the load generator left to the stack."""
    return float(row["goodput_rps"] / (num_cores - row["generator_cpu_share"]))


def machines() -> Iterator[str]:
    """One row per setting and door."""
    doors: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result("machines")["rows"]:
        doors.setdefault((row["setting"], row["door"]), []).append(row)
    rows = []
    for short, *crowded, after in doors.values():
        goodput = [row["goodput_of_peak"] for row in crowded if row["multiple"] >= _LEAST_OVERLOAD]
        rows.append(
            short
            | {name: largest(crowded, name) for name in ("answered_p99_ms", "refused_p99_ms", "refusal_cost")}
            | {"generator_cpu_share": largest([*crowded, after], "generator_cpu_share"), "after": after}
            | {
                "capacity_rps": crowded[0]["capacity_rps"],
                "goodput": " / ".join(f"{fraction:.2f}" for fraction in goodput),
            }
        )
    return table(
        "setting | door | % within 50 ms | CPU ms | capacity/s | goodput of peak at 2 / 5 / 10 | answers p99 ms | "
        "refusals p99 ms | % in time 5 s after | cost of a refusal | generator, cores",
        "{setting} | {door} | {deadline_met:%2} | {cpu_ms:.1f} | {capacity_rps:.0f} | {goodput} | "
        "{answered_p99_ms:.0f} | {refused_p99_ms:.0f} | {after[deadline_met]:%1} | {refusal_cost:.2f} | "
        "{generator_cpu_share:.2f}",
        rows,
    )


def slower_machines() -> dict[str, float]:
    """Return the fraction in time of the worse door, by setting."""
    met: dict[str, float] = {}
    for row in result("machines")["rows"]:
        if row["kind"] == "deadline":
            met[row["setting"]] = min(met.get(row["setting"], 1.0), row["deadline_met"])
    return met


def scale() -> Iterator[str]:
    """The smallest and the largest size of each axis."""
    axes: dict[str, list[dict[str, Any]]] = {}
    for row in result("scale")["rows"]:
        axes.setdefault(row["axis"], []).append(row)
    names = ("loop_ms", "p99_ms", "rss_mb", "freshness_p99_ms", "restart_s")
    yield from table(
        "axis | size | CPU ms | p99 ms | memory MB | freshness p99 ms | restart s",
        "{axis} | {size:,} | {loop_ms} | {p99_ms} | {rss_mb} | {freshness_p99_ms} | {restart_s}",
        [row | {name: _short(row[name]) for name in names} for own in axes.values() for row in (own[0], own[-1])],
    )
    yield ""
    yield fill(
        "The student's ranking over {size:,} items: {student_ms:.1f} ms, {student_mb:.0f} MB, {recall:.1%} of the "
        "exact top ten.",
        axes["items"][-1],
    )


def _short(value: float | None) -> str | None:
    return value if value is None else format(value, ".3g" if value < 1_000 else ",.0f")


def pipeline() -> Iterator[str]:
    """Processor seconds and peak memory of each stage, for three sizes."""
    rows = result("pipeline")["rows"]
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    points: dict[tuple[int, int], dict[str, Any]] = {}
    for row in rows:
        cost = None if row["cpu_s"] is None else f"{float(format(row['cpu_s'], '.3g')):,g} / {row['rss_mb']:,}"
        size = {name: row[name] for name in ("events", "items")}
        points.setdefault((row["events"], row["items"]), size)[row["stage"]] = cost
    sizes = list(points.values())
    return table(
        " | ".join(("events", "items", *stages)),
        "{events:,} | {items:,} | " + " | ".join(f"{{{stage}}}" for stage in stages),
        (sizes[0], sizes[len(sizes) // 2], sizes[-1]),
    )


def faults_of_peers() -> Iterator[str]:
    """One row per fault of another server that ranks and writes."""
    rows = result("faults-peers")["rows"]
    shares = [{kind: row["text"][kind] / row["text"]["asked"] for kind in ("lists", "in_time")} for row in rows]
    return table(
        "fault | % answered | % in time | p99 ms | with a text: % answered / in time | lists / text recovered after s",
        "{fault} | " + OUTCOME + " | {lists:%2} / {in_time:%2} | {recovery_s:.1f} / {text[recovered_s]:.1f}",
        [row | share for row, share in zip(rows, shares, strict=True)],
    )


def _fault_rows(name: str) -> Iterator[str]:
    """One row per fault: of one machine, of a machine of about a third of the speed, of a model on two processes."""
    head = "fault | % answered | % in time | p99 ms | recovered after s"
    return table(head, "{fault} | " + OUTCOME + " | {recovery_s:.1f}", result(name)["rows"])


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
    worst = {name: min(row[name] for row in rows) for name in ("availability", "deadline_met")}
    worst |= {name: max(row[name] for row in rows) for name in ("p99_ms", "recovery_s")}
    yield fill(
        "Over {num} faults of a head and two nodes at least {availability:%2} % of requests were answered and "
        "{deadline_met:%2} % in time; the largest p99 was {p99_ms:.0f} ms, the slowest recovery {recovery_s:.1f} s.",
        worst | {"num": len(rows)},
    )


def spike() -> Iterator[str]:
    """The callers of the low-priority spike, by priority."""
    (row,) = (row for row in result("faults")["rows"] if "low" in row["by_priority"])
    callers = [{"name": name, **part} for name, part in (row["by_priority"] | row["by_door"]).items()]
    head = "callers | requests | % answered | % in time | p99 ms"
    return table(head, "{name} | {num_requests:,} | " + OUTCOME, callers)


def releases() -> Iterator[str]:
    """One row per candidate release."""
    return table(
        "candidate | rolled back after s | promoted after s | lost requests",
        "{name} | {rolled_back_after_s:.0f} | {live_after_s:.0f} | {num_lost} of {num_requests:,}",
        result("release")["cases"],
    )


def soak() -> Iterator[str]:
    """One row per kind of request, and the accounts of events and explanations."""
    run = result("soak")
    head = "requests | number | % answered | % in time | p99 ms"
    yield from table(head, "{row} | {num_requests:,} | " + OUTCOME, run["doors"])
    broken = [f"{row['part']} {row['quantity']}" for row in run["growth"] if row["verdict"] == "broken"]
    yield ""
    yield fill(
        "Of {events[num_acknowledged]:,} acknowledged events {events[num_lost]} were lost and {events[num_doubled]} "
        "counted twice. Of {explained[asked]:,} explanations {different} differed; {explained[missing_in_faults]} were "
        "lost during faults of the store. Growth above its bound: {broken}.",
        run | {"different": len(run["explained"]["different"]), "broken": ", ".join(broken) or "none"},
    )
