"""Tables of model quality: data sets, warm start, engines, simulated releases."""

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.serving import in_time, slower_machines
from benchmarks.pages.table import interval, middle_and_tail, optional, percent, result, table

_DATA = {
    ("quality", "leave-one-out"): "MovieLens-100k",
    ("quality", "global-time"): "MovieLens-100k, one cut in time",
    ("quality-yelp", "leave-one-out"): "Yelp",
    ("quality-lastfm", "leave-one-out"): "LastFM",
    ("quality-beauty", "leave-one-out"): "Beauty",
    ("quality-beauty-codes", "leave-one-out"): "Beauty, codes of depth 3",
}
_SERVED = ("decoder", "student", "mixed_student")
_BASELINES = ("unlearned", "item_knn", "popularity")
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
_READERS = ("unread", "keywords", "clauses", "encoder", "mix", "oracle")
_FOREIGN = {"foreign-beauty": "four layers of Qwen2, Beauty", "foreign-smollm2": "SmolLM2-135M, Beauty"}
_FOREIGN_LISTS = ("framework", "vocabulary", "catalogue", "evaluate")
_ENGINES = ("tailrace", "tailrace-int8", "transformers", "vllm", "llamacpp")


def readme() -> Iterator[str]:
    """The figures of the README."""
    rest = {case["tier"]: case for case in result("serve")["cases"] if case["door"] == "rest"}
    fresh, (num, met) = result("freshness"), in_time()
    quality_ = {(row["split"], row["model"]): row for row in result("quality")["rows"]}
    beams = {row["engine"]: row for row in result("engine")["cases"] if row["name"] == "beams-32"}
    hits = (f"{quality_['leave-one-out', name]['hr10']:.4f}" for name in ("decoder", "student", "item_knn"))
    ratios = (f"{beams[name]['ratio_to_best_peer']:.2f}x" for name in _ENGINES[:2])
    rows = [
        ("student over REST, p50 / p99", f"{middle_and_tail(rest['student'], 1)} ms"),
        ("LLM over REST, p50 / p99", f"{middle_and_tail(rest['llm'], 1)} ms"),
        ("answers within a deadline of 50 ms", f"{percent(met)} % of {num:,}"),
        *slower_machines(),
        ("event accepted until visible in an answer, p50 / p99", f"{middle_and_tail(fresh)} ms"),
        ("HR@10 on MovieLens-100k, decoder / student / item-kNN", " / ".join(hits)),
        ("32 beams a request against vLLM's CPU build, bf16 / int8", " / ".join(ratios)),
    ]
    return table(("figure", "value"), rows)


def quality() -> Iterator[str]:
    """NDCG@10 as served by data set: models with intervals, and baselines; a dash where a run has no such row."""
    rows = []
    for (name, split), data in _DATA.items():
        measured = {row["model"]: row for row in result(name)["rows"] if row["split"] == split}
        models = (_with_interval(measured.get(model)) for model in _SERVED)
        baselines = (f"{measured[model]['ndcg10']:.4f}" if model in measured else "-" for model in _BASELINES)
        rows.append((data, *models, *baselines))
    head = ("data", "decoder", "student", "student with sources", "sources only", "item-kNN", "popularity")
    return table(head, rows)


def _with_interval(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['ndcg10']:.4f} ({row['ci95'][0]:.4f} to {row['ci95'][1]:.4f})"


def distillation() -> Iterator[str]:
    """Students by their sources of training, and the paired gain of targets and rows."""
    rows = []
    for name, data in _VARIANTS.items():
        run = result(name)
        served = {row["model"]: row["ndcg10"] for row in run["rows"] if row["split"] == "leave-one-out"}
        earned = {(row["model"], row["over"]): row for row in run["distillation"] if row["split"] == "leave-one-out"}
        cells = (f"{served[model]:.4f}" for model in ("distilled", "twin", "student_alone", "graph"))
        gains = (interval(earned["distilled", over]) for over in ("twin", "student_alone"))
        rows.append((data, *cells, *gains))
    head = ("data", "targets and rows", "rows", "neither", "graph", "gain of targets", "gain of targets and rows")
    return table(head, rows)


def decoder_gain() -> Iterator[str]:
    """The decoder's NDCG@10 minus its student's over all users, leave-one-out."""
    rows = []
    for name, data in _GAINS.items():
        (gain,) = (row for row in result(name)["gain"] if (row["slice"], row["split"]) == ("all", "leave-one-out"))
        difference = f"{gain['llm_minus_student']:+.4f} ({gain['low']:+.4f} to {gain['high']:+.4f})"
        routing = {(row["policy"], row["split"]): row for row in result(name)["routing"]}
        routed = routing["routed", "leave-one-out"]
        rows.append((data, f"{gain['num_cases']:,}", difference, percent(routed["llm_share"], 1)))
    return table(("data", "users", "decoder minus student", "% routed to the LLM"), rows)


def warm_start() -> Iterator[str]:
    """A warm start against a full training, with 2 % new events."""
    rows = []
    for name, data in _WARM.items():
        run = result(name)
        times = {(row["new_share"], row["model"]): row["share_of_time"] for row in run["times"]}
        largest = max(row["new_share"] for row in run["rows"])
        for row in run["rows"]:
            if (row["split"], row["new_share"]) == ("test", largest):
                kept = f"{row['kept']:.1%} ({row['ci95'][0]:.1%} to {row['ci95'][1]:.1%})"
                time = f"{times[largest, row['model']]:.0%}"
                rows.append((data, row["model"], f"{row['whole']:.4f}", f"{row['warm']:.4f}", kept, time))
    return table(("data", "model", "whole", "warm", "kept", "time"), rows)


def wishes() -> Iterator[str]:
    """NDCG@10 of written wishes by kind and reader, and the share of excluded items among the first ten."""
    rows = []
    for kind, row in sorted(result("wishes-quality")["written"].items(), key=lambda one: one[0] == "all"):
        closed = f"{row['closed']:.2f} ({row['closed_interval'][0]:.2f} to {row['closed_interval'][1]:.2f})"
        values = (f"{row[reader]:.3f}" for reader in _READERS)
        avoided = " / ".join(optional(row.get(f"violations_{reader}"), ".3f") for reader in ("unread", "mix"))
        rows.append((kind.replace("_", " "), f"{row['num_wishes']:,}", *values, closed, avoided))
    return table(("kind", "wishes", *_READERS, "closed", "excluded items, unread / mix"), rows)


def open_wishes() -> Iterator[str]:
    """The share of avoided items among the first ten by style, before and after the newest rules of English."""
    before, now = result("wishes-open-first")["open"], result("wishes-quality")["open"]
    rows = []
    for style, row in sorted(now.items(), key=lambda one: one[0] == "all"):
        values = [row["violations_unread"], before[style]["violations_mix"], row["violations_clauses"]]
        shares = (f"{value:.3f}" for value in (*values, row["violations_mix"]))
        rows.append((style, f"{row['num_wishes']}", *shares))
    return table(("style", "wishes", "unread", "mix, rules before", "clauses", "mix"), rows)


def wish_readers() -> Iterator[str]:
    """The readers that learn, against the shipped reader, on written and open wishes."""
    found, rows = result("wishes-trained"), []
    for row in found["rows"]:
        name = row["reader"]
        change, low, high = row["change"]
        change = "-" if name == "shipped" else f"{change:+.3f} ({low:+.3f} to {high:+.3f})"
        shares = (optional(share, ".3f") for share in (row["violations"], found["open"]["all"].get(name)))
        time_ms = optional(found["wish_ms"].get(name), ",.0f")
        name = name.replace("_", " ")
        rows.append(
            (name, f"{row['num_wishes']}", f"{row['ndcg10']:.3f}", change, f"{row['closed']:.2f}", *shares, time_ms)
        )
    head = ("wishes", "NDCG@10", "change", "closed", "excluded items", "avoided, open wishes", "ms a wish")
    return table(("reader", *head), rows)


def foreign() -> Iterator[str]:
    """One row per imported recommender: agreement with its framework's decoding, and the quality of both."""
    rows = []
    for name, model in _FOREIGN.items():
        run = result(name)
        quality_ = (
            f"{run[lists]['hr@10']:.4f} / {run[lists]['ndcg@10']:.4f}" if lists in run else "-"
            for lists in _FOREIGN_LISTS
        )
        equal = (percent(run["equal_prompts"], 1), percent(run["equal_positions"], 2))
        rows.append((model, str(run["num_rows"]), *equal, *quality_))
    head = ("model", "rows", "prompts equal, %", "top 10 equal, %", "framework HR@10 / NDCG@10")
    return table((*head, "vocabulary", "catalogue", "evaluate.py, bf16"), rows)


def engines() -> Iterator[str]:
    """One row per case: each engine's value, and the ratio to the best peer."""
    measured = (row for run in ("engine", "engine-foreign") for row in result(run)["cases"])
    cases = {(row["name"], row["engine"]): row for row in measured}
    rows = []
    for name in dict.fromkeys(name for name, _ in cases):
        values = (f"{cases[name, one]['value']:,.4g}" if (name, one) in cases else "-" for one in _ENGINES)
        ratios = (f"{cases[name, engine]['ratio_to_best_peer']:.2f}x" for engine in _ENGINES[:2])
        rows.append((name, cases[name, "tailrace"]["unit"], *values, *ratios))
    head = (
        "case",
        "unit",
        "bf16",
        "int8",
        "transformers",
        "vLLM",
        "llama.cpp",
        "bf16 to best peer",
        "int8 to best peer",
    )
    return table(head, rows)


def engine_figures() -> Iterator[str]:
    """Roofline, curves, validity and numerics of the engine, and the text door's overhead."""
    run, curves, validity = result("engine"), result("engine-curves"), result("engine-validity")
    steps = {(row["case"], row["engine"], row["step"]): row for row in run["roofline"]}
    step, batch = steps["decode-1", "tailrace", "decode"], steps["decode-32", "tailrace", "decode"]
    prefill = steps["prefill-16x512", "tailrace", "prefill"]
    states = {row["state"]: row["ms"] for row in curves["history"] if row["history_items"] == 800}
    best = {name: percent(row["best_share"], 1) for name, row in run["quality"].items()}
    error = max(row["logits_max_error"] for row in run["quality"].values())
    door = [case["door_over_engine"] for case in result("text")["cases"]]
    drafts = result("speculation")["rows"]
    rows = [
        ("decode step of one row, % of memory bandwidth", percent(step["memory_share"], 0)),
        (
            "decode step of 32 rows / prefill, % of bf16 peak",
            f"{percent(batch['compute_share'], 0)} / {percent(prefill['compute_share'], 0)}",
        ),
        ("largest error of fp32 logits against transformers", f"{error:.1e}"),
        (
            "greedy tokens that are the fp32 model's best, %, bf16 / int8 / vLLM",
            f"{best['tailrace']} / {best['tailrace-int8']} / {best['vllm']}",
        ),
        (
            "ranking with 800 items of history, ms, cold / one new event",
            f"{states['cold']:.0f} / {states['new_event']:.0f}",
        ),
        ("invalid items in final beams", f"{validity['invalid']} of {validity['beams']:,}"),
        (
            "text door over the bare engine at 1 / 8 / 32 streams, % of tokens/s",
            " / ".join(percent(row["tokens_per_s"], 0) for row in door),
        ),
        (
            f"speed-up of whole requests by drafts: {', '.join(row['case'] for row in drafts)}",
            " / ".join(f"{row['request_ratio']:.2f}x" for row in drafts),
        ),
    ]
    return table(("figure", "value"), rows)


def worse_candidates() -> Iterator[str]:
    """Time until canary analysis finds simulated worse candidates."""
    run = result("release-simulated")
    rows = [
        (
            case["name"],
            f"{case['found_within_10_minutes']} of {case['num']}",
            f"{case['found_within_30_minutes']}",
            optional(case["median_found_after_s"], ".0f"),
        )
        for case in run["worse"]
    ]
    yield from table(("candidate", "within 10 minutes", "within 30", "median s"), rows)
    day, stages = run["day"], run["stages"]
    yield ""
    yield (
        f"Equal candidates found worse: {day['false_alarms']} of {day['num']:,} in a day with {day['num_guards']} "
        f"guards, {stages['false_alarms']} of {stages['num']:,} in a release of {stages['num_stages']} stages."
    )


def layouts() -> Iterator[str]:
    """One row per layout of a training over workers, and the ranks that were killed."""
    parts = result("train")["parts"]
    rows = [
        (
            f"{row['workers']} x {row['parallel']}",
            f"{row['losses'][-1]:.6f}",
            f"{row['loss_difference']:.1e}",
            *(f"{row['shares_of_time'][name]:.0%}" for name in ("step", "others")),
        )
        for row in parts["layouts"]["rows"]
    ]
    yield from table(
        ("workers", "last loss", "largest relative difference", "time in steps", "waiting for ranks"), rows
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
