"""Tables of model quality: data sets, warm start, engines, simulated releases."""

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.serving import in_time, slower_machines
from benchmarks.pages.table import figures, fill, result, table

_DATA = {
    ("quality", "leave-one-out"): "MovieLens-100k",
    ("quality", "global-time"): "MovieLens-100k, one cut in time",
    ("quality-yelp", "leave-one-out"): "Yelp",
    ("quality-lastfm", "leave-one-out"): "LastFM",
    ("quality-beauty", "leave-one-out"): "Beauty",
    ("quality-beauty-codes", "leave-one-out"): "Beauty, codes of depth 3",
}
_VARIANTS = {
    "quality": "MovieLens-100k",
    "quality-yelp": "Yelp",
    "quality-lastfm": "LastFM",
    "quality-beauty-variants": "Beauty",
}
_GAINS = {
    "quality": "MovieLens-100k",
    "quality-beauty": "Beauty, student of 44 %",
    "quality-beauty-lean-student": "Beauty, student of 21 %",
}
_WARM = {"warm-start": "MovieLens-100k", "warm-start-beauty": "Beauty"}
_FOREIGN = {"foreign-beauty": "four layers of Qwen2, Beauty", "foreign-smollm2": "SmolLM2-135M, Beauty"}
_FOREIGN_LISTS = ("framework", "vocabulary", "catalogue", "evaluate")
_ENGINES = ("tailrace", "tailrace-int8", "transformers", "vllm", "llamacpp")
_INTERVAL = "{difference:+.4f} ({low:+.4f} to {high:+.4f})"


def readme() -> Iterator[str]:
    """The figures of the README."""
    cases = {f"{case['tier']}_{case['door']}": case for case in result("serve")["cases"]}
    quality_ = {row["model"]: row["hr10"] for row in result("quality")["rows"] if row["split"] == "leave-one-out"}
    beams = {row["engine"]: row["ratio_to_best_peer"] for row in result("engine")["cases"] if row["name"] == "beams-32"}
    num, met = in_time()
    return figures(
        cases | quality_ | beams | {"num": num, "met": met, "fresh": result("freshness"), "slower": slower_machines()},
        "student over REST, p50 / p99 | {student_rest[p50_ms]:.1f} / {student_rest[p99_ms]:.1f} ms",
        "LLM over REST, p50 / p99 | {llm_rest[p50_ms]:.1f} / {llm_rest[p99_ms]:.1f} ms",
        "answers within a deadline of 50 ms | {met:%2} % of {num:,}",
        "the same on one core / beside busy processes | {slower[one core]:%2} / {slower[hogs]:%2} %",
        "event accepted until visible in an answer, p50 / p99 | {fresh[p50_ms]:.0f} / {fresh[p99_ms]:.0f} ms",
        "HR@10 on MovieLens-100k, decoder / student / item-kNN | {decoder:.4f} / {student:.4f} / {item_knn:.4f}",
        "32 beams a request against vLLM's CPU build, bf16 / int8 | {tailrace:.2f}x / {tailrace-int8:.2f}x",
    )


def quality() -> Iterator[str]:
    """NDCG@10 as served by data set: models with intervals, and baselines; a dash where a run has no such row."""
    rows = [
        {"data": data} | {row["model"]: row for row in result(name)["rows"] if row["split"] == split}
        for (name, split), data in _DATA.items()
    ]
    models = ("decoder", "student", "mixed_student")
    served = "{it[ndcg10]:.4f} ({it[ci95][0]:.4f} to {it[ci95][1]:.4f})"
    return table(
        "data | decoder | student | student with sources | sources only | item-kNN | popularity",
        "{data} | {decoder} | {student} | {mixed_student} | {unlearned[ndcg10]:.4f} | {item_knn[ndcg10]:.4f} | "
        "{popularity[ndcg10]:.4f}",
        [row | {name: fill(served, {"it": row[name]}) if name in row else None for name in models} for row in rows],
    )


def distillation() -> Iterator[str]:
    """Students by their sources of training, and the paired gain of targets and rows."""
    rows = []
    for name, data in _VARIANTS.items():
        run = result(name)
        served = {row["model"]: row["ndcg10"] for row in run["rows"] if row["split"] == "leave-one-out"}
        earned = {(row["model"], row["over"]): row for row in run["distillation"] if row["split"] == "leave-one-out"}
        gains = {f"{over}_gain": fill(_INTERVAL, earned["distilled", over]) for over in ("twin", "student_alone")}
        rows.append({"data": data} | served | gains)
    return table(
        "data | targets and rows | rows | neither | graph | gain of targets | gain of targets and rows",
        "{data} | {distilled:.4f} | {twin:.4f} | {student_alone:.4f} | {graph:.4f} | {twin_gain} | "
        "{student_alone_gain}",
        rows,
    )


def decoder_gain() -> Iterator[str]:
    """The decoder's NDCG@10 minus its student's over all users, leave-one-out."""
    rows = []
    for name, data in _GAINS.items():
        (gain,) = (row for row in result(name)["gain"] if (row["slice"], row["split"]) == ("all", "leave-one-out"))
        routing = {(row["policy"], row["split"]): row for row in result(name)["routing"]}
        rows.append({"data": data, "difference": gain["llm_minus_student"]} | gain | routing["routed", "leave-one-out"])
    columns = "{data} | {num_cases:,} | " + _INTERVAL + " | {llm_share:%1}"
    return table("data | users | decoder minus student | % routed to the LLM", columns, rows)


def warm_start() -> Iterator[str]:
    """A warm start against a full training, with 2 % new events."""
    rows = []
    for name, data in _WARM.items():
        run = result(name)
        times = {(row["new_share"], row["model"]): row["share_of_time"] for row in run["times"]}
        largest = max(row["new_share"] for row in run["rows"])
        own = [row for row in run["rows"] if (row["split"], row["new_share"]) == ("test", largest)]
        rows += [row | {"data": data, "time": times[largest, row["model"]]} for row in own]
    return table(
        "data | model | whole | warm | kept | time",
        "{data} | {model} | {whole:.4f} | {warm:.4f} | {kept:.1%} ({ci95[0]:.1%} to {ci95[1]:.1%}) | {time:.0%}",
        rows,
    )


def _all_last(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows by name with their names, the row of all last."""
    names = sorted(rows, key=lambda name: name == "all")
    return [{"name": name.replace("_", " "), **rows[name]} for name in names]


def wishes() -> Iterator[str]:
    """NDCG@10 of written wishes by kind and reader, and the share of excluded items among the first ten."""
    return table(
        "kind | wishes | unread | keywords | clauses | encoder | mix | oracle | closed | excluded items, unread / mix",
        "{name} | {num_wishes:,} | {unread:.3f} | {keywords:.3f} | {clauses:.3f} | {encoder:.3f} | {mix:.3f} | "
        "{oracle:.3f} | {closed:.2f} ({closed_interval[0]:.2f} to {closed_interval[1]:.2f}) | "
        "{violations_unread:.3f} / {violations_mix:.3f}",
        _all_last(result("wishes-quality")["written"]),
    )


def open_wishes() -> Iterator[str]:
    """The share of avoided items among the first ten by style, before and after the newest rules of English."""
    before, rows = result("wishes-open-first")["open"], _all_last(result("wishes-quality")["open"])
    return table(
        "style | wishes | unread | mix, rules before | clauses | mix",
        "{name} | {num_wishes} | {violations_unread:.3f} | {before:.3f} | {violations_clauses:.3f} | "
        "{violations_mix:.3f}",
        [row | {"before": before[row["name"]]["violations_mix"]} for row in rows],
    )


def wish_readers() -> Iterator[str]:
    """The readers that learn, against the shipped reader, on written and open wishes."""
    run = result("wishes-trained")
    change = "{change[0]:+.3f} ({change[1]:+.3f} to {change[2]:+.3f})"
    rows = [
        row
        | {"name": name.replace("_", " "), "change": "-" if name == "shipped" else fill(change, row)}
        | {"open": run["open"]["all"].get(name), "wish_ms": run["wish_ms"].get(name)}
        for row in run["rows"]
        for name in [row["reader"]]
    ]
    return table(
        "reader | wishes | NDCG@10 | change | closed | excluded items | avoided, open wishes | ms a wish",
        "{name} | {num_wishes} | {ndcg10:.3f} | {change} | {closed:.2f} | {violations:.3f} | {open:.3f} | "
        "{wish_ms:,.0f}",
        rows,
    )


def foreign() -> Iterator[str]:
    """One row per imported recommender: agreement with its framework's decoding, and the quality of both."""
    rows = [{"model": model} | result(name) for name, model in _FOREIGN.items()]
    hits = "{it[hr@10]:.4f} / {it[ndcg@10]:.4f}"
    return table(
        "model | rows | prompts equal, % | top 10 equal, % | framework HR@10 / NDCG@10 | vocabulary | catalogue | "
        "evaluate.py, bf16",
        "{model} | {num_rows} | {equal_prompts:%1} | {equal_positions:%2} | {framework} | {vocabulary} | {catalogue} | "
        "{evaluate}",
        [row | {name: fill(hits, {"it": row[name]}) for name in _FOREIGN_LISTS if name in row} for row in rows],
    )


def engines() -> Iterator[str]:
    """One row per case: each engine's value, and the ratio to the best peer."""
    cases: dict[str, dict[str, Any]] = {}
    for row in (row for run in ("engine", "engine-foreign") for row in result(run)["cases"]):
        cases.setdefault(row["name"], {"name": row["name"]})[row["engine"]] = row
    ratios = " | ".join(f"{{{engine}[ratio_to_best_peer]:.2f}}x" for engine in _ENGINES[:2])
    return table(
        "case | unit | bf16 | int8 | transformers | vLLM | llama.cpp | bf16 to best peer | int8 to best peer",
        "{name} | {tailrace[unit]} | "
        + " | ".join(f"{{{engine}[value]:,.4g}}" for engine in _ENGINES)
        + f" | {ratios}",
        cases.values(),
    )


def engine_figures() -> Iterator[str]:
    """Roofline, curves, validity and numerics of the engine, and the text door's overhead."""
    run, curves = result("engine"), result("engine-curves")
    steps = {f"{row['case']}, {row['step']}": row for row in run["roofline"] if row["engine"] == "tailrace"}
    states = {row["state"]: row["ms"] for row in curves["history"] if row["history_items"] == 800}
    error = max(row["logits_max_error"] for row in run["quality"].values())
    door = " / ".join(f"{100 * case['door_over_engine']['tokens_per_s']:.0f}" for case in result("text")["cases"])
    drafts = result("speculation")["rows"]
    return figures(
        run["quality"] | states | result("engine-validity") | {"steps": steps, "error": error},
        "decode step of one row, % of memory bandwidth | {steps[decode-1, decode][memory_share]:%0}",
        "decode step of 32 rows / prefill, % of bf16 peak | "
        "{steps[decode-32, decode][compute_share]:%0} / {steps[prefill-16x512, prefill][compute_share]:%0}",
        "largest error of fp32 logits against transformers | {error:.1e}",
        "greedy tokens that are the fp32 model's best, %, bf16 / int8 / vLLM | "
        "{tailrace[best_share]:%1} / {tailrace-int8[best_share]:%1} / {vllm[best_share]:%1}",
        "ranking with 800 items of history, ms, cold / one new event | {cold:.0f} / {new_event:.0f}",
        "invalid items in final beams | {invalid} of {beams:,}",
        f"text door over the bare engine at 1 / 8 / 32 streams, % of tokens/s | {door}",
        f"speed-up of whole requests by drafts: {', '.join(row['case'] for row in drafts)} | "
        + " / ".join(f"{row['request_ratio']:.2f}x" for row in drafts),
    )


def worse_candidates() -> Iterator[str]:
    """Time until canary analysis finds simulated worse candidates."""
    run = result("release-simulated")
    columns = "{name} | {found_within_10_minutes} of {num} | {found_within_30_minutes} | {median_found_after_s:.0f}"
    yield from table("candidate | within 10 minutes | within 30 | median s", columns, run["worse"])
    yield ""
    yield fill(
        "Equal candidates found worse: {day[false_alarms]} of {day[num]:,} in a day with {day[num_guards]} guards, "
        "{stages[false_alarms]} of {stages[num]:,} in a release of {stages[num_stages]} stages.",
        run,
    )


def layouts() -> Iterator[str]:
    """One row per layout of a training over workers, and the ranks that were killed."""
    parts = result("train")["parts"]
    yield from table(
        "workers | last loss | largest relative difference | time in steps | waiting for ranks",
        "{workers} x {parallel} | {last:.6f} | {loss_difference:.1e} | {shares_of_time[step]:.0%} | "
        "{shares_of_time[others]:.0%}",
        [row | {"last": row["losses"][-1]} for row in parts["layouts"]["rows"]],
    )
    *_, half, power = parts["gradients"]["rows"]
    (killed,) = parts["kills"]["rows"]
    same = "the undisturbed run's, bit for bit" if killed["is_same"] else "not the undisturbed run's"
    yield ""
    yield (
        f"Killed were {' and '.join(killed['kills'])}, by SIGKILL: losses and weights are {same}. "
        f"fp16 gradients change the last loss by {half['loss_difference']:.1e}, "
        f"PowerSGD by {power['loss_difference']:.1%}."
    )
