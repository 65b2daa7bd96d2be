"""Every measured number that the pages print is the results file's: a new run that is filed without its page fails here."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.faults.page import matrix, priorities
from pipelines.planner.step_time import fitted
from pipelines.profiler.verdict import COMPUTE_SHARE, LOSSES, MEMORY_SHARE
from tests.support.pages import ROOT

MODELS = {
    "decoder": "decoder",
    "student": "student",
    "twin": "student without distillation",
    "item_knn": "item-kNN",
    "bigram": "bigram",
    "popularity": "popularity",
}
VARIANTS = {
    "quality": "MovieLens-100k",
    "quality-yelp": "Yelp",
    "quality-lastfm": "LastFM",
    "quality-beauty-variants": "Beauty",
}
SPLITS = {"leave-one-out": "leave one out", "global-time": "one cut in time"}
ENGINES = ("tailrace", "tailrace-int8", "transformers", "vllm")
ENGINE_CASES = {
    "decode-1": "text, 1 at a time",
    "decode-8": "text, 8",
    "decode-32": "text, 32",
    "prefill-16x512": "prefill, 16 x 512",
    "beams-8": "8 beams",
    "beams-32": "32 beams",
    "beams-128": "128 beams",
}


def result(name: str) -> dict[str, Any]:
    """Read a results file."""
    read: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return read


def serve_lines() -> Iterator[str]:
    """A line for each tier: both doors, and the lesser of their shares in time."""
    cases = result("serve")["cases"]
    for tier in ("noop", "student", "popular", "precomputed", "llm"):
        doors = [case for case in cases if case["tier"] == tier]
        assert [case["door"] for case in doors] == ["rest", "grpc"]
        latencies = (f"{case['p50_ms']:.1f} / {case['p99_ms']:.1f}" for case in doors)
        in_time = min(case["deadline_met"] for case in doors)
        name = "a call that does nothing" if tier == "noop" else tier
        yield f"| {name} | {' | '.join(latencies)} | {100 * in_time:.2f} % |"


def share_in_time() -> tuple[int, float]:
    """Return how many requests were sent to tiers, and the percentage that came in time."""
    cases = [case for case in result("serve")["cases"] if case["tier"] != "noop"]
    num = sum(case["num_requests"] for case in cases)
    return num, 100 * sum(case["num_requests"] * case["deadline_met"] for case in cases) / num


def serve_ratios() -> Iterator[str]:
    """What the student costs over a call that does nothing, and how many of all answers came in time."""
    cases = result("serve")["cases"]
    student, nothing = ([case["p50_ms"] for case in cases if case["tier"] == tier] for tier in ("student", "noop"))
    rest, grpc = (one / other for one, other in zip(student, nothing, strict=True))
    yield f"The student costs {rest:.1f} times a call that does nothing over REST, {grpc:.1f} times over gRPC."
    yield "Of {} answers {:.2f} % came within 50 ms.".format(*share_in_time())


def catalogue_lines() -> Iterator[str]:
    """A row for each run of hidden items, and what a million items cost."""
    run = result("catalogue")
    for name, what in (
        ("hide", "all running"),
        ("hide_redis_kill", "Redis killed"),
        ("hide_worker_takeover", "the stream worker killed"),
    ):
        one = run[name]
        seen = f"{one['num_shown_after_1s']} of {one['num_answers']}"
        yield f"| {what} | {one['num_changes']} | {one['p50_ms']:.0f} / {one['p99_ms']:.0f} | {seen} |"
    size = run["size"]
    yield f"take {size['memory_mb']:.0f} MB"
    yield f"{size['start_cpu_s']:.1f} s of processor time, {size['start_s']:.1f} s by the clock"
    yield f"{size['request_with_ms']:.2f} ms, {size['request_without_ms']:.2f} ms"


def freshness_line() -> Iterator[str]:
    """Events, and when they were visible."""
    run = result("freshness")
    latencies = f"p50 {run['p50_ms']:.0f} ms, p99 {run['p99_ms']:.0f} ms"
    yield f"{run['num_events']} events under load, accepted until visible in `Recommend`: {latencies}"


def rules_lines() -> Iterator[str]:
    """A line a tier, what the stage takes, and what an expression does."""
    run = result("rules")
    for case in run["requests"]:
        spent_ms = " | ".join(f"{case[f'{kind}_p50_ms']:.1f}" for kind in ("plain", "surface", "body"))
        yield f"| {case['tier']} | {spent_ms} | {case['surface_over_plain_p50']:.2f} | {case['body_over_plain_p50']:.2f} |"
    stage, expressions = run["stage"], run["expressions"]
    yield f"takes {stage['choose_ms']:.2f} ms, with all six rules {stage['choose_and_rules_ms']:.2f} ms"
    kept, mended = (round(1_000 * expressions[name]) for name in ("kept_ms", "after_a_change_ms"))
    yield f"over {expressions['num_items']:,} items is compiled in {expressions['compile_p50_ms']:.0f} ms"
    yield f"found again in {kept} µs, and mended after the change of an item in {mended} µs"


def quality_rows() -> dict[tuple[str, str], dict[str, Any]]:
    """By split and model, the row over all seeds."""
    return {(row["split"], row["model"]): row for row in result("quality")["rows"]}


def quality_lines() -> Iterator[str]:
    """A line for each model with its interval in both splits, one for each length of history, and one for each policy of routing."""
    rows, run = quality_rows(), result("quality")
    for model, name in MODELS.items():
        cells = (
            f"{row['hr10']:.4f} / {row['ndcg10']:.4f} ({row['ci95'][0]:.4f} to {row['ci95'][1]:.4f})"
            for row in (rows[split, model] for split in SPLITS)
        )
        yield f"| {name} | {' | '.join(cells)} |"
    for row in run["gain"]:
        if row["slice"] == "all" or row["slice"].startswith("history"):
            gain = f"{row['llm_minus_student']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
            yield f"| {SPLITS[row['split']]} | {row['slice']} | {row['num_cases']} | {gain} | {row['llm_minus_student_std']:.4f} |"
    for row in run["routing"]:
        per_ms = "" if row["ndcg_per_decoder_ms"] is None else f"{row['ndcg_per_decoder_ms']:.4f}"
        cost = f"{row['ndcg10']:.4f} | {row['decoder_ms_per_request']:.2f} | {per_ms}"
        yield f"| {SPLITS[row['split']]} | {row['policy']} | {cost} | {100 * row['llm_share']:.0f} % |"


def variant_lines() -> Iterator[str]:
    """A line for each data set with variants on file: NDCG@10 as served, and what the decoder's targets, and its rows too, earn."""
    for name, words in VARIANTS.items():
        rows, earned_rows = (
            [row for row in result(name)[kind] if row["split"] == "leave-one-out"] for kind in ("rows", "distillation")
        )
        served = {row["model"]: f"{row['ndcg10']:.4f}" for row in rows}
        cells = [served[model] for model in ("decoder", "distilled", "twin", "student_alone", "graph")]
        earned = {(row["model"], row["over"]): row for row in earned_rows}
        for over in ("twin", "student_alone"):
            row = earned["distilled", over]
            cells.append(f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})")
        yield f"| [{words}](../benchmarks/results/{name}.json) | {' | '.join(cells)} |"


def seen_items_line() -> Iterator[str]:
    """What Yelp's student has by seen items."""
    (row,) = result("quality-yelp")["seen_items"]
    yield f"the student has {row['ndcg10']:.4f} with seen items and {row['other_ndcg10']:.4f} without ({row['difference']:+.4f}, {row['low']:+.4f} to {row['high']:+.4f})"


def deep_codes_lines() -> Iterator[str]:
    """The codes and the decoder's size, and a line for each model that knows items by their codes."""
    run = result("quality-beauty-codes")
    first, rows = run["runs"][0], {row["model"]: row for row in run["rows"]}
    yield f"each item three codes of {' x '.join(map(str, first['level_sizes']))}"
    yield f"the decoder of {first['num_parameters']['decoder']['all']:,} parameters"
    names = {"decoder": "decoder, codes of depth 3", "student": "its student", "twin": "the same without distillation"}
    for model, name in names.items():
        row = rows[model]
        masked = f"{row['hr10']:.4f} / {row['ndcg10']:.4f} ({row['ci95'][0]:.4f} to {row['ci95'][1]:.4f})"
        yield f"| {name} | {masked} | {row['hr10_unmasked']:.4f} / {row['ndcg10_unmasked']:.4f} |"


def nested_lines() -> Iterator[str]:
    """A line for each data set and model: NDCG@10 of what the gate judged and of what is published."""
    for name, data in (("quality-nested", "MovieLens-100k"), ("quality-nested-beauty", "Amazon Beauty")):
        for row in result(name)["nested"]:
            both = f"{row['unrefitted_ndcg10']:.4f} | {row['ndcg10']:.4f} | {row['ratio']:.3f}"
            yield f"| {data} | {row['model']} | {both} | {row['low']:+.4f} to {row['high']:+.4f} |"


def engine_lines() -> Iterator[str]:
    """A line for each case: all engines' values, then how ours stand to the best peer."""
    rows = {(row["name"], row["engine"]): row for row in result("engine")["cases"]}
    for case, name in ENGINE_CASES.items():
        values = [f"{rows[case, engine]['value']:,.4g}" for engine in ENGINES]
        ratios = [f"{rows[case, engine]['ratio_to_best_peer']:.2f}x" for engine in ENGINES[:2]]
        yield f"| {name} | {rows[case, 'tailrace']['unit']} | {' | '.join(values + ratios)} |"


def engine_shares() -> Iterator[str]:
    """How near to the machine's limits, to the fp32 logits and to the reference's tokens."""
    run = result("engine")
    steps = {(row["case"], row["engine"], row["step"]): row for row in run["roofline"]}
    one, many = steps["decode-1", "tailrace", "decode"], steps["decode-32", "tailrace", "decode"]
    int8, prefill = steps["decode-32", "tailrace-int8", "decode"], steps["prefill-16x512", "tailrace", "prefill"]
    best = {name: f"{100 * judged['best_share']:.1f} %" for name, judged in run["quality"].items()}
    error = max(judged["logits_max_error"] for judged in run["quality"].values())
    yield f"at {100 * one['memory_share']:.0f} % of the memory's speed as measured beside it ({one['limit_gbytes_per_s']:.0f} GB/s)"
    yield (
        f"one of 32 rows at {100 * many['compute_share']:.0f} % of the processor's ({many['limit_tflops_per_s']:.2f} TFLOP/s),"
        f" with int8 at {100 * int8['compute_share']:.0f} %, prefill at {100 * prefill['compute_share']:.0f} %"
    )
    yield f"Logits in fp32 are transformers' to {error:.1e}".replace("e-0", "e-")
    yield f"{best['tailrace-int8']} of their greedy tokens are the fp32 model's best, of bf16 {best['tailrace']} (vLLM {best['vllm']})"


def curve_and_count_words() -> Iterator[str]:
    """What a ranking costs as history and catalogue grow, and how many beams were judged with none invalid."""
    curves, judged = result("engine-curves"), result("engine-validity")
    longest = {row["state"]: row["ms"] for row in curves["history"] if row["history_items"] == 800}
    tries = curves["trie_and_masks"]
    sizes, seconds = [trie["trie_mb"] for trie in tries], [trie["build_s"] for trie in tries]
    yield f"800 items of history cost {longest['new_event']:.0f} ms instead of {longest['cold']:.0f} cold"
    yield f"A catalogue of 10^6 items takes {min(sizes):.0f} to {max(sizes):.0f} MB and {min(seconds):.2f} to {max(seconds):.1f} s to build"
    assert judged["beams"] >= 1_000_000
    assert judged["invalid"] == 0
    yield f"A million final beams over {judged['catalogues']} catalogues"


def optimised_lines() -> Iterator[str]:
    """A line for each variant of a decoder, and what training with the engine's numbers earns over rounding alone."""
    run = result("variants")
    for row in run["rows"]:
        kind = row["weight_kind"] or "-"
        between = f"{row['difference']:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})"
        beside = f"{row['times_as_fast_as_int8']:.2f}x | {row['share_of_int8_bytes']:.0%}"
        cost = f"{row['request_ms']:.2f} | {row['tokens_per_s']:,.0f} | {row['weight_bytes'] / 1e6:.1f}"
        yield f"| {row['name']} | {kind} | {row['ndcg']:.4f} | {between} | {cost} | {beside} |"
    gap = run["qat_minus_ptq"]
    yield f"{gap['difference']:+.1%} ({gap['low']:+.1%} to {gap['high']:+.1%}) over rounding alone"
    yield f"Amazon Beauty, {run['num_users']:,} users, a decoder of {run['num_parameters']:,} parameters"


def overload_lines() -> Iterator[str]:
    """A line for each door and multiple of its capacity, with the figures of high, normal and low priority."""
    cases: dict[tuple[str, float, bool], list[dict[str, Any]]] = {}
    for row in result("overload")["rows"]:
        cases.setdefault((row["door"], row["multiple"], row["is_after_overload"]), []).append(row)
    for (door, multiple, is_after), rows in cases.items():
        assert [row["priority"] for row in rows] == ["high", "normal", "low"]
        in_time = " / ".join(f"{row['goodput_rps']:.0f}" for row in rows)
        waits = (
            " / ".join("-" if row[name] is None else f"{row[name]:.0f}" for row in rows)
            for name in ("answered_p99_ms", "refused_p99_ms")
        )
        words = f"{multiple:g}, 5 s after" if is_after else f"{multiple:g}"
        yield f"| {door} | {words} | {rows[0]['rate_rps']:.0f} | {in_time} | {' | '.join(waits)} |"


def scale_lines() -> Iterator[str]:
    """A line for each axis and size."""
    for row in result("scale")["rows"]:
        names = ("loop_ms", "p99_ms", "rss_mb", "freshness_p99_ms", "restart_s")
        cells = " | ".join("" if row[name] is None else str(row[name]) for name in names)
        yield f"| {row['axis']} | {row['size']:,} | {cells} |"
        if "student_ms" in row and row["axis"] == "items":
            yield f"| {row['size']:,} | {row['student_ms']} | {row['student_mb']} | {row['recall']:.1%} |"


def kept_by_kinds_of_keys() -> Iterator[str]:
    """How many of the ten best one-byte keys and values keep."""
    kept = {row["kv_kind"]: f"{100 * row['overlap@10']:.1f} %" for row in result("kv-kinds")["rankings"]}
    yield f"keep {kept['int8']} of the ten best on MovieLens; fp8 {kept['fp8']}"


def store_words() -> Iterator[str]:
    """The bytes of a user's rows in the feature store."""
    kinds = result("capacity")["store"]["by_kind"]
    yield f"A history takes {kinds['history']['mean_bytes']:,} bytes, the mean over MovieLens' {kinds['history']['rows']} users"
    yield f"A stored list of 100 items takes {kinds['list']['mean_bytes']:,} bytes"


def pipeline_lines() -> Iterator[str]:
    """A line for each point: processor seconds and memory of each stage; then the tokens of training."""
    rows = result("pipeline")["rows"]
    stages = dict.fromkeys(row["stage"] for row in rows)
    for events, items in dict.fromkeys((row["events"], row["items"]) for row in rows):
        point = {row["stage"]: row for row in rows if (row["events"], row["items"]) == (events, items)}
        measured = (point.get(name, {"cpu_s": None}) for name in stages)
        cells = (
            "" if row["cpu_s"] is None else f"{float(format(row['cpu_s'], '.3g')):,g} / {row['rss_mb']:,}"
            for row in measured
        )
        yield f"| {events:,} | {items:,} | {' | '.join(cells)} |"
        tokens = [point[name]["tokens_per_cpu_s"] if name in point else None for name in ("train", "distill")]
        if any(tokens):
            yield f"| {events:,} | {items:,} | {' | '.join(f'{number:,}' if number else '' for number in tokens)} |"


def cold_lines() -> Iterator[str]:
    """A line for each baseline, then for each model and lift: recall with its interval, the gain over the nearest text, and what trained items lose."""
    run = result("cold-items")
    scopes = ("all", "among_cold")
    recalls = {(row["model"], row["lift"], row["scope"]): row for row in run["rows"]}
    gained = {(row["model"], row["lift"], row["scope"]): row for row in run["gains"] if row["over"] == "nearest_text"}
    for name in ("popularity", "nearest_text", "nearest_embedding"):
        cells = (f"{row['recall10']:.4f} ({_low_high(row)}) | " for row in (recalls[name, None, one] for one in scopes))
        yield f"| {name.replace('_', ' ')} | | {' | '.join(cells)} | |"
    for row in run["ordinary"]:
        cells = (
            f"{recalls[place]['recall10']:.4f} ({_low_high(recalls[place])}) | {gained[place]['gain']:+.4f} ({_low_high(gained[place], '+')})"
            for place in ((row["model"], row["lift"], scope) for scope in scopes)
        )
        yield f"| {row['model']} | {row['lift']:g} | {' | '.join(cells)} | {row['before']:.4f} to {row['ndcg10']:.4f} ({_low_high(row, '+')}) |"
    yield f"{run['num_cold_items']} of {run['num_items']:,} items, {run['num_cases']:,} events of theirs, and {run['num_ordinary_cases']:,} of trained items"


def weight_lines() -> Iterator[str]:
    """What ratings as weights of events are worth, by model and labels."""
    for row in result("quality-weights")["rows"]:
        low, high = (f"{bound:+.4f}" for bound in row["ci95"])
        yield f"| {row['model']} | {row['labels']} | {row['even']:.4f} | {row['rated']:.4f} | {low} to {high} |"


def dislike_lines() -> Iterator[str]:
    """What learning against low ratings is worth, by measure."""
    names = {
        "ndcg": ("NDCG@10 of labels rated 4 and 5", 4),
        "rank_held_out": ("mean rank of dislikes held out", 1),
        "rank_learned": ("mean rank of dislikes learned", 1),
    }
    for row in result("quality-dislikes")["rows"]:
        name, digits = names[row["measure"]]
        means = " | ".join(f"{row[kind]:.{digits}f}" for kind in ("dropped", "against"))
        low, high = (f"{bound:+.{digits}f}" for bound in row["ci95"])
        yield f"| {name} | {row['num_users']} | {means} | {low} to {high} |"


def warm_lines() -> Iterator[str]:
    """A line for each data set, share and model: NDCG@10 of the test labels, what is kept of it, and the share of the time."""
    for name, data in (("warm-start", "MovieLens-100k"), ("warm-start-beauty", "Amazon Beauty")):
        run = result(name)
        times = {(row["new_share"], row["model"]): row["share_of_time"] for row in run["times"]}
        for row in run["rows"]:
            if row["split"] == "test":
                low, high = row["ci95"]
                kept = f"{row['kept']:.1%} ({low:.1%} to {high:.1%})"
                cells = " | ".join(f"{row[kind]:.4f}" for kind in ("live", "whole", "warm"))
                share = times[row["new_share"], row["model"]]
                yield f"| {data} | {row['new_share']:.1%} | {row['model']} | {cells} | {kept} | {share:.0%} |"


def _low_high(row: dict[str, Any], sign: str = "") -> str:
    low, high = row["ci95"]
    return f"{low:{sign}.4f} to {high:{sign}.4f}"


def fault_words() -> Iterator[str]:
    """Nothing acknowledged was lost or counted twice; who came in time in the spike."""
    rows = {row["fault"]: row for row in result("faults")["rows"]}
    assert not any(
        row[sent][fate] for row in rows.values() for sent in ("events", "batches") for fate in ("lost", "doubled")
    )
    yield "No acknowledged event was lost or counted twice in any row, whether sent alone or in batches of 500."
    spike = rows["low-priority-spike"]
    high, rest, grpc = (
        f"{100 * part['deadline_met']:.2f}"
        for part in (
            spike["by_priority"]["high"],
            spike["by_door"]["high over REST"],
            spike["by_door"]["high over gRPC"],
        )
    )
    yield f"of those of high priority {high} % came in time in this run (REST {rest}, gRPC {grpc})"


def fault_page() -> Iterator[str]:
    """The whole matrix and the spike's callers, as the benchmark prints them."""
    rows = result("faults")["rows"]
    yield matrix(rows)
    yield matrix(result("faults-nodes")["rows"])
    yield from (priorities(row) for row in rows if "low" in row["by_priority"])


def text_words() -> Iterator[str]:
    """What comes through the door of the engine's speed, and when the first token comes."""
    cases = [case["door_over_engine"] for case in result("text")["cases"]]
    shares = (f"{100 * case['tokens_per_s']:.0f} %" for case in cases)
    added = (f"{case['ttft_added_ms']:.0f}" for case in cases)
    yield "{} of the engine's tokens per second at one stream, {} at eight and {} at 32".format(*shares)
    yield "the first token {}, {} and {} ms later".format(*added)


def train_lines() -> Iterator[str]:
    """A line for each layout of training, of a text checkpoint too, and what kills changed."""
    parts = {name: part["rows"] for name, part in result("train")["parts"].items()}
    for row in parts["layouts"]:
        shares = [f"{row['shares_of_time'][name]:.0%}" for name in ("step", "others")]
        yield f"| {row['workers']} x {row['parallel']} | {row['losses'][-1]:.6f} | {row['loss_difference']:.1e} | {' | '.join(shares)} |"
    for row in parts["text"]:
        if row["moved_by"]:
            yield f"moved by {row['moved_by']:g} of themselves ends up to {100 * row['loss_difference']:.1f} %"
        else:
            yield f"| {row['workers']} x {row['parallel']} | {row['losses'][0]:.6f} | {row['losses'][-1]:.4f} |"
    *_, half, power = parts["gradients"]
    yield f"fp16 changes the last loss by {half['loss_difference']:.1e}, PowerSGD by {100 * power['loss_difference']:.1f} % ({power['losses'][-1]:.4f})"
    (killed,) = parts["kills"]
    assert killed["is_same"]
    yield f"Killed were {' and '.join(killed['kills'])}"


def plan_words() -> Iterator[str]:
    """How far the planner's predictions are from the runs that it was not fitted to, and for a chip that it has not seen."""
    run = result("plan")
    halves, devices = run["cross"]["halves"], {row["device"]: row for row in run["cross"]["without_device"]}
    yield f"fitted to half of {run['num_rows']} published runs"
    yield f"On the other half ({run['num_judged']} runs) the median error is {run['median_error_points']:.2f} points of MFU, 90 % are within {run['p90_error_points']:.2f}"
    yield f"{100 * run['share_within_interval']:.0f} % lie in the interval, whose half width is {run['median_half_width_points']:.2f} points"
    yield f"Over {halves['number']} random halves the median is {halves['median_error_points']:.2f} on the mean and {halves['worst_median_error_points']:.2f} at worst"
    yield f"the H100's MFU is {devices['h100']['median_error_points']:.2f} points too high; the interval is {fitted().unseen:.1f} times as wide"


def profile_words() -> Iterator[str]:
    """How many planted bottlenecks the profiler named, how many healthy steps it accused, and its thresholds."""
    run = result("profile")
    yield f"{run['named']} of {run['plants']} named, {run['accused']} of {run['healthy']} healthy ones accused"
    for kind, share in LOSSES.items():
        yield f"| {kind.value} | {100 * share:.0f} % |"
    yield f"| memory, compute | {100 * MEMORY_SHARE:.0f} %, {100 * COMPUTE_SHARE:.0f} % |"


def experiment_words() -> Iterator[str]:
    """False alarms and times of the verdict, coverage of reports and off-policy estimates, and the join."""
    run = result("experiments")
    release, reports, joined = run["release"], run["reports"], run["join"]
    yield f"worse in {release['false_alarms_of_1000']} of 1,000 days"
    for case in run["worse"]["cases"]:
        times = [case[name] for name in ("median_found_after_s", "worst_found_after_s")]
        cells = " | ".join("-" if time is None else f"{time:.0f} s" for time in times)
        yield f"| {case['name']} | {case['found_within_10_minutes']} of {case['num']} | {case['found_within_30_minutes']} | {cells} |"
    yield f"A/A with {reports['a_a']['num_looks']} daily looks: {reports['a_a']['false_alarms_of_1000']} of 1,000"
    yield f"the truth at every look in {reports['intervals']['covered_share']:.1%} of {reports['intervals']['num']}"
    mismatch = reports["mismatch"]
    yield f"found in {mismatch['found_of_1000']} of 1,000, with {mismatch['false_alarms_of_1000']} false"
    for log in run["off-policy"]["logs"]:
        shares = [
            f"{one['covered_share']:.1%}" if (one := log[name]) else "-" for name in ("ips", "snips", "doubly_robust")
        ]
        yield f"| {log['log']} | {log['refused']} of {log['num']} | {' | '.join(shares)} |"
    assert joined["is_equal"]
    yield f"{joined['num_impressions']:,} impressions and {joined['num_events']:,} events in {joined['join_s']:.1f} s"


def release_words() -> Iterator[str]:
    """Releases on a stack under load, false alarms, racing promoters, and users' versions."""
    run = result("release")
    for case in run["cases"]:
        after = [case.get(name) for name in ("rolled_back_after_s", "live_after_s")]
        cells = " | ".join("-" if time is None else f"{time:.0f} s" for time in after)
        yield f"| {case['name']} | {cells} | {case['num_lost']} of {case['num_requests']:,} | {case['num_refused']} |"
    yield f"worse in {run['false_alarms_of_1000']} of 1,000 releases"
    racing, same = run["racing_promoters"], run["same_version"]
    yield f"of {racing['num']} promoters at once {racing['num_won']} wins, and {racing['num_told']} are told"
    yield f"{same['num_users']:,} users, at both doors and the standby, before and after a restart: {same['num_changes']} changes"


def readme_lines() -> Iterator[str]:
    """The six numbers of README."""
    rest = {case["tier"]: case for case in result("serve")["cases"] if case["door"] == "rest"}
    num, met = share_in_time()
    freshness, models = result("freshness"), quality_rows()
    engine = {(row["name"], row["engine"]): row for row in result("engine")["cases"]}
    for name, tier in (("student", "student"), ("LLM", "llm")):
        yield f"| {name} over REST, p50 / p99 | {rest[tier]['p50_ms']:.1f} / {rest[tier]['p99_ms']:.1f} ms |"
    yield f"| answers within a deadline of 50 ms | {met:.2f} % of {num:,} |"
    yield f"| event accepted until visible in an answer, p50 / p99 | {freshness['p50_ms']:.0f} / {freshness['p99_ms']:.0f} ms |"
    hits = (f"{models['leave-one-out', name]['hr10']:.4f}" for name in ("decoder", "student", "item_knn"))
    yield f"| HR@10 on MovieLens-100k, decoder / student / item-kNN | {' / '.join(hits)} |"
    ratios = (f"{engine['beams-32', name]['ratio_to_best_peer']:.2f}x" for name in ENGINES[:2])
    yield f"| 32 beams a request against vLLM's CPU build, bf16 / int8 | {' / '.join(ratios)} |"


PAGES = {
    "README.md": (readme_lines,),
    "docs/benchmarks.md": (
        serve_lines,
        serve_ratios,
        catalogue_lines,
        freshness_line,
        rules_lines,
        quality_lines,
        variant_lines,
        seen_items_line,
        deep_codes_lines,
        nested_lines,
        cold_lines,
        weight_lines,
        dislike_lines,
        warm_lines,
        engine_lines,
        engine_shares,
        curve_and_count_words,
        kept_by_kinds_of_keys,
        optimised_lines,
        overload_lines,
        scale_lines,
        pipeline_lines,
        fault_words,
        fault_page,
        text_words,
        experiment_words,
        release_words,
    ),
    "docs/capacity.md": (store_words,),
    "docs/scale.md": (plan_words, train_lines, profile_words),
}
PRINTED = [(page, lines) for page, sources in PAGES.items() for lines in sources]


@pytest.mark.parametrize(("page", "lines"), PRINTED, ids=[lines.__name__ for _, lines in PRINTED])
def test_pages_print_what_is_on_file(page: str, lines: Callable[[], Iterator[str]]) -> None:
    """Tables line by line, and the numbers within sentences, wherever the page breaks its lines."""
    text = " ".join((ROOT / page).read_text().split())
    wanted = [" ".join(words.split()) for words in lines()]

    assert wanted
    assert [words for words in wanted if words not in text] == []
