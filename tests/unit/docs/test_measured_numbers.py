"""Every measured number that the pages print is the results file's: a new run that is filed without its page fails here."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from string import Formatter
from typing import Any

import pytest

from benchmarks.faults.page import matrix, priorities
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


class Words(Formatter):
    """Words with the fields of a result in them. `!p` is in per cent, `!u` in thousandths, `!m` in millions; a unit may follow the number's format; what was not measured is a dash."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a field's value, None for one that is not there."""
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):
            return None, field_name

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Scale a number."""
        return {"p": 100, "u": 1e3, "m": 1e-6}[conversion] * value if conversion else value

    def format_field(self, value: Any, format_spec: str) -> str:
        """Write a number, and its unit."""
        number, space, unit = format_spec.partition(" ")
        return "-" if value is None else format(value, number) + space + unit


def result(name: str) -> dict[str, Any]:
    """Read a results file."""
    read: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return read


def written(name: str, place: str, words: str) -> list[str]:
    """Return the words with the fields at a place of a results file, such as `a.0.b` or of rows `rows.name=x`: once, or for each row."""
    found: Any = result(name)
    for part in filter(None, place.split(".")):
        name, equals, value = part.partition("=")
        if equals:
            found = [row for row in found if row[name] == value]
        else:
            found = found[int(part)] if isinstance(found, list) else found[part]
    return [Words().format(words, **row) for row in (found if isinstance(found, list) else [found])]


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


def quality_rows() -> dict[tuple[str, str], dict[str, Any]]:
    """By split and model, the row over all seeds."""
    return {(row["split"], row["model"]): row for row in result("quality")["rows"]}


def quality_lines() -> Iterator[str]:
    """A line for each model with its interval in both splits, one for each length of history, and what routing comes to: no decoder."""
    rows, run = quality_rows(), result("quality")
    for model, name in MODELS.items():
        cells = (
            f"{row['hr10']:.4f} / {row['ndcg10']:.4f} ({row['ci95'][0]:.4f} to {row['ci95'][1]:.4f})"
            for row in (rows[split, model] for split in SPLITS)
        )
        yield f"| {name} | {' | '.join(cells)} |"
    for row in run["gain"]:
        if row["slice"] == "all" or (row["slice"].startswith("history") and row["split"] == "leave-one-out"):
            gain = f"{row['llm_minus_student']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
            yield f"| {SPLITS[row['split']]} | {row['slice']} | {row['num_cases']} | {gain} | {row['llm_minus_student_std']:.4f} |"
    assert not any(row["llm_share"] for row in run["routing"] if row["policy"] == "routed")
    costs = (row["decoder_ms_per_request"] for row in run["routing"] if row["policy"] == "always-llm")
    yield f"its requests would cost {' and '.join(f'{ms:.2f}' for ms in costs)} ms"


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


def engine_error() -> Iterator[str]:
    """How near to the fp32 logits."""
    error = max(judged["logits_max_error"] for judged in result("engine")["quality"].values())
    yield f"Logits in fp32 are transformers' to {error:.1e}".replace("e-0", "e-")


def curve_words() -> Iterator[str]:
    """What a ranking costs as history and catalogue grow."""
    curves = result("engine-curves")
    longest = {row["state"]: row["ms"] for row in curves["history"] if row["history_items"] == 800}
    tries = curves["trie_and_masks"]
    sizes, seconds = [trie["trie_mb"] for trie in tries], [trie["build_s"] for trie in tries]
    yield f"800 items of history cost {longest['new_event']:.0f} ms instead of {longest['cold']:.0f} cold"
    yield f"A catalogue of 10^6 items takes {min(sizes):.0f} to {max(sizes):.0f} MB and {min(seconds):.2f} to {max(seconds):.1f} s to build"


def engine_lines() -> Iterator[str]:
    """A line for each case: all engines' values, then how ours stand to the best peer."""
    rows = {(row["name"], row["engine"]): row for row in result("engine")["cases"]}
    for case, name in ENGINE_CASES.items():
        values = [f"{rows[case, engine]['value']:,.4g}" for engine in ENGINES]
        ratios = [f"{rows[case, engine]['ratio_to_best_peer']:.2f}x" for engine in ENGINES[:2]]
        yield f"| {name} | {rows[case, 'tailrace']['unit']} | {' | '.join(values + ratios)} |"


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


def pipeline_lines() -> Iterator[str]:
    """A line for each point: processor seconds and memory of each stage."""
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


def dislike_lines() -> Iterator[str]:
    """What learning against low ratings is worth, by measure."""
    names = {
        "ndcg": ("NDCG@10 of labels rated 4 and 5", 4),
        "rank_held_out": ("mean rank of dislikes held out", 1),
        "rank_learned": ("mean rank of dislikes learned", 1),
    }
    for name, how in (("quality-dislikes", " alone"), ("quality-dislikes-pair", "")):
        for row in result(name)["rows"]:
            measure, digits = names[row["measure"]]
            means = " | ".join(f"{row[kind]:.{digits}f}" for kind in ("dropped", "against"))
            low, high = (f"{bound:+.{digits}f}" for bound in row["ci95"])
            yield f"| {row['model']}{how} | {measure} | {row['num_users']} | {means} | {low} to {high} |"


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


def fault_page() -> Iterator[str]:
    """The whole matrix and the spike's callers, as the benchmark prints them."""
    rows = result("faults")["rows"]
    yield matrix(rows)
    yield matrix(result("faults-nodes")["rows"])
    yield from (priorities(row) for row in rows if "low" in row["by_priority"])


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
    yield f"Killed were {' and '.join(killed['kills'])}"


def plan_words() -> Iterator[str]:
    """The planner's errors by group of runs."""
    plan = result("plan")
    devices, groups = {row["device"]: row for row in plan["cross"]["without_device"]}, plan["groups"]
    shares = {name: f"{100 * group['share_within_interval']:.0f} %" for name, group in groups.items()}
    yield f"the H100's MFU is {devices['h100']['median_error_points']:.2f} points too high"
    yield f"{shares['data']} of the other half lie in the interval"
    yield f"{groups['parallel']['number']} cited runs"
    yield f"{shares['parallel']} lie in the interval that the other sources gave"
    yield f"Of {groups['unseen']['number']} errors on chips or models that a fit had not seen, {shares['unseen']} lie"


def profile_words() -> Iterator[str]:
    """The profiler's thresholds."""
    for kind, share in LOSSES.items():
        yield f"| {kind.value} | {100 * share:.0f} % |"
    yield f"| memory, compute | {100 * MEMORY_SHARE:.0f} %, {100 * COMPUTE_SHARE:.0f} % |"


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


BENCHMARKS, SCALE = "docs/benchmarks.md", "docs/scale.md"
COMPUTED = {
    "README.md": (readme_lines,),
    BENCHMARKS: (
        serve_lines,
        serve_ratios,
        quality_lines,
        variant_lines,
        dislike_lines,
        warm_lines,
        engine_lines,
        engine_error,
        curve_words,
        overload_lines,
        scale_lines,
        pipeline_lines,
        fault_page,
    ),
    SCALE: (train_lines, profile_words, plan_words),
}
HIDDEN = "{num_changes} | {p50_ms:.0f} / {p99_ms:.0f} | {num_shown_after_1s} of {num_answers} |"
NESTED = "{model} | {unrefitted_ndcg10:.4f} | {ndcg10:.4f} | {ratio:.3f} | {low:+.4f} to {high:+.4f} |"
UNMASKED = "{hr10:.4f} / {ndcg10:.4f} ({ci95[0]:.4f} to {ci95[1]:.4f}) | {hr10_unmasked:.4f} / {ndcg10_unmasked:.4f} |"
ROOFLINE = "roofline.case"
SPEED, ADDED = "[door_over_engine][tokens_per_s]!p:.0f", "[door_over_engine][ttft_added_ms]:.0f"
BETWEEN = "{difference:+.4f}, {low:+.4f} to {high:+.4f}"
IN_WORDS: list[tuple[str, str, str, str]] = [
    (BENCHMARKS, "freshness", "", "{num_events} events under load, accepted until visible in `Recommend`: p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms"),
    (BENCHMARKS, "catalogue", "hide", f"| all running | {HIDDEN}"),
    (BENCHMARKS, "catalogue", "hide_redis_kill", f"| Redis killed | {HIDDEN}"),
    (BENCHMARKS, "catalogue", "hide_worker_takeover", f"| the stream worker killed | {HIDDEN}"),
    (BENCHMARKS, "catalogue", "size", "take {memory_mb:.0f} MB"),
    (BENCHMARKS, "catalogue", "size", "{start_cpu_s:.1f} s of processor time, {start_s:.1f} s by the clock"),
    (BENCHMARKS, "catalogue", "size", "{request_with_ms:.2f} ms, {request_without_ms:.2f} ms"),
    (BENCHMARKS, "rules", "requests", "| {tier} | {plain_p50_ms:.1f} | {surface_p50_ms:.1f} | {body_p50_ms:.1f} | {surface_over_plain_p50:.2f} | {body_over_plain_p50:.2f} |"),
    (BENCHMARKS, "rules", "stage", "takes {choose_ms:.2f} ms, with all six rules {choose_and_rules_ms:.2f} ms"),
    (BENCHMARKS, "rules", "expressions", "over {num_items:,} items is compiled in {compile_p50_ms:.0f} ms"),
    (BENCHMARKS, "rules", "expressions", "found again in {kept_ms!u:.0f} µs, and mended after the change of an item in {after_a_change_ms!u:.0f} µs"),
    (BENCHMARKS, "quality-yelp", "seen_items", f"the student has {{ndcg10:.4f}} with seen items and {{other_ndcg10:.4f}} without ({BETWEEN})"),
    (BENCHMARKS, "quality-beauty-codes", "runs", "each item three codes of {level_sizes[0]} x {level_sizes[1]} x {level_sizes[2]}"),
    (BENCHMARKS, "quality-beauty-codes", "runs", "the decoder of {num_parameters[decoder][all]:,} parameters"),
    (BENCHMARKS, "quality-nested", "nested", f"| MovieLens-100k | {NESTED}"),
    (BENCHMARKS, "quality-nested-beauty", "nested", f"| Amazon Beauty | {NESTED}"),
    (BENCHMARKS, "engine-validity", "", "A million final beams over {catalogues} catalogues"),
    (BENCHMARKS, "variants", "", "Amazon Beauty, {num_users:,} users, a decoder of {num_parameters:,} parameters"),
    (BENCHMARKS, "variants", "qat_minus_ptq", "{difference:+.1%} ({low:+.1%} to {high:+.1%}) over rounding alone"),
    (BENCHMARKS, "quality-beauty-codes", "rows.model=decoder", f"| decoder, codes of depth 3 | {UNMASKED}"),
    (BENCHMARKS, "quality-beauty-codes", "rows.model=student", f"| its student | {UNMASKED}"),
    (BENCHMARKS, "quality-beauty-codes", "rows.model=twin", f"| the same without distillation | {UNMASKED}"),
    (BENCHMARKS, "variants", "rows", "| {name} | {weight_kind} | {ndcg:.4f} | {difference:+.1%} ({low:+.1%} to {high:+.1%}) | {request_ms:.2f} | {tokens_per_s:,.0f} | {weight_bytes!m:.1f} | {times_as_fast_as_int8:.2f}x | {share_of_int8_bytes:.0%} |"),
    (BENCHMARKS, "engine", f"{ROOFLINE}=decode-1.engine=tailrace.step=decode", "at {memory_share!p:.0f %} of the memory's speed as measured beside it ({limit_gbytes_per_s:.0f} GB/s)"),
    (BENCHMARKS, "engine", f"{ROOFLINE}=decode-32.engine=tailrace.step=decode", "one of 32 rows at {compute_share!p:.0f %} of the processor's ({limit_tflops_per_s:.2f} TFLOP/s), with int8"),
    (BENCHMARKS, "engine", f"{ROOFLINE}=decode-32.engine=tailrace-int8.step=decode", "with int8 at {compute_share!p:.0f %}, prefill"),
    (BENCHMARKS, "engine", f"{ROOFLINE}=prefill-16x512.engine=tailrace.step=prefill", "prefill at {compute_share!p:.0f %}"),
    (BENCHMARKS, "kv-kinds", "rankings.kv_kind=int8", "keep {overlap@10!p:.1f %} of the ten best on MovieLens; fp8"),
    (BENCHMARKS, "kv-kinds", "rankings.kv_kind=fp8", "of the ten best on MovieLens; fp8 {overlap@10!p:.1f %}"),
    (BENCHMARKS, "engine", "quality", "{tailrace-int8[best_share]!p:.1f %} of their greedy tokens are the fp32 model's best, of bf16 {tailrace[best_share]!p:.1f %} (vLLM {vllm[best_share]!p:.1f %})"),
    (BENCHMARKS, "faults", "rows.fault=low-priority-spike", "of those of high priority {by_priority[high][deadline_met]!p:.2f %} came in time in this run (REST {by_door[high over REST][deadline_met]!p:.2f}, gRPC {by_door[high over gRPC][deadline_met]!p:.2f})"),
    (BENCHMARKS, "text", "", f"{{cases[0]{SPEED} %}} of the engine's tokens per second at one stream, {{cases[1]{SPEED} %}} at eight and {{cases[2]{SPEED} %}} at 32"),
    (BENCHMARKS, "text", "", f"the first token {{cases[0]{ADDED}}}, {{cases[1]{ADDED}}} and {{cases[2]{ADDED}}} ms later"),
    (BENCHMARKS, "experiments", "release", "worse in {false_alarms_of_1000} of 1,000 days"),
    (BENCHMARKS, "experiments", "worse.cases", "| {name} | {found_within_10_minutes} of {num} | {found_within_30_minutes} | {median_found_after_s:.0f s} | {worst_found_after_s:.0f s} |"),
    (BENCHMARKS, "experiments", "reports.a_a", "A/A with {num_looks} daily looks: {false_alarms_of_1000} of 1,000"),
    (BENCHMARKS, "experiments", "reports.intervals", "the truth at every look in {covered_share:.1%} of {num}"),
    (BENCHMARKS, "experiments", "reports.mismatch", "found in {found_of_1000} of 1,000, with {false_alarms_of_1000} false"),
    (BENCHMARKS, "experiments", "off-policy.logs", "| {log} | {refused} of {num} | {ips[covered_share]:.1%} | {snips[covered_share]:.1%} | {doubly_robust[covered_share]:.1%} |"),
    (BENCHMARKS, "release", "cases", "| {name} | {rolled_back_after_s:.0f s} | {live_after_s:.0f s} | {num_lost} of {num_requests:,} | {num_refused} |"),
    (BENCHMARKS, "release", "", "worse in {false_alarms_of_1000} of 1,000 releases"),
    (BENCHMARKS, "release", "same_version", "{num_users:,} users, at both doors and the standby, before and after a restart: {num_changes} changes"),
    ("docs/capacity.md", "capacity", "store.by_kind.history", "A history takes {mean_bytes:,} bytes, the mean over MovieLens' {rows} users"),
    ("docs/capacity.md", "capacity", "store.by_kind.list", "A stored list of 100 items takes {mean_bytes:,} bytes"),
    (SCALE, "plan", "", "fitted to {num_fitted_rows} published runs"),
    (SCALE, "plan", "cross.halves", "Over {number} random halves the median error is {median_error_points:.2f} points of MFU on the mean and {worst_median_error_points:.2f} at worst"),
    (SCALE, "profile", "", "{named} of {plants} named, {accused} of {healthy} healthy ones accused"),
]  # fmt: skip
"""By page, the results file, the place in it, and what the page prints for each row there."""
PRINTED = [
    *((page, lines) for page, sources in COMPUTED.items() for lines in sources),
    *((page, partial(written, *where)) for page, *where in IN_WORDS),
]
IDS = [
    *(lines.__name__ for sources in COMPUTED.values() for lines in sources),
    *(f"{one[1]} {one[2]}" for one in IN_WORDS),
]


@pytest.mark.parametrize(("page", "lines"), PRINTED, ids=IDS)
def test_pages_print_what_is_on_file(page: str, lines: Callable[[], Iterable[str]]) -> None:
    """Tables line by line, and the numbers within sentences, wherever the page breaks its lines."""
    text = " ".join((ROOT / page).read_text().split())
    wanted = [" ".join(words.split()) for words in lines()]

    assert wanted
    assert [words for words in wanted if words not in text] == []


def test_what_must_hold_held() -> None:
    """No acknowledged event was lost or counted twice, no beam was invalid, and a killed training ended the same."""
    fates = [
        row[sent][fate]
        for row in result("faults")["rows"]
        for sent in ("events", "batches")
        for fate in ("lost", "doubled")
    ]
    judged, page = result("engine-validity"), " ".join((ROOT / BENCHMARKS).read_text().split())

    assert not any(fates)
    assert (
        "No acknowledged event was lost or counted twice in any row, whether sent alone or in batches of 500." in page
    )
    assert (judged["beams"] >= 1_000_000, judged["invalid"]) == (True, 0)
    assert all(one["is_same"] for one in result("train")["parts"]["kills"]["rows"])
