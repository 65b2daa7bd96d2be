"""Every measured number that the pages print is the results file's: a new run that is filed without its page fails here."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from benchmarks.faults.page import matrix, priorities
from tests.support.pages import ROOT

NUMBERS = re.compile(r"(?:[\d.,+()%/ -]|to)*\d(?:[\d.,+()%/ -]|to)*")
"""A cell that holds numbers alone."""
NUMBER = re.compile(r"([+-]?\d[\d,]*\.?(\d*))( ?%)?")
FILE = re.compile(r"results/([\w-]+)\.json")
SUMMED = "A soak"
"""The section whose table adds up what its file has by door."""
SECTIONS = {
    section.partition("\n")[0]: section
    for section in re.split(r"^##+ ", (ROOT / "docs/benchmarks.md").read_text(), flags=re.MULTILINE)
    if FILE.search(section)
}


def result(name: str) -> dict[str, Any]:
    """Read a results file."""
    read: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return read


def figures(value: Any) -> Iterator[float]:
    """Yield every number of a results file, but for each seed's own."""
    if isinstance(value, dict):
        value = [part for name, part in value.items() if name != "runs"]
    if isinstance(value, list):
        for part in value:
            yield from figures(part)
    elif isinstance(value, int | float):
        yield value


@cache
def printed(names: frozenset[str], num_decimals: int, scale: int) -> set[float]:
    """Return the numbers of these files as a page prints them: rounded, to three or four digits at the least."""
    scaled = [scale * number for name in names for number in figures(result(name))]
    digits = {float(f"{number:.{digits}g}") for number in scaled for digits in (3, 4)}
    return {round(number, num_decimals) for number in scaled} | digits


@pytest.mark.parametrize("section", sorted(SECTIONS.keys() - {SUMMED}))
def test_tables_print_what_is_on_file(section: str) -> None:
    """Each number in a cell of numbers is one of those in the results files that the section links to."""
    files = frozenset(FILE.findall(SECTIONS[section]))
    rows = [line.strip("|").split("|") for line in SECTIONS[section].splitlines() if line.startswith("|")]
    wrong = [
        (row[0].strip(), text)
        for row in rows
        for cell in row[1:]
        if NUMBERS.fullmatch(cell)
        for text, decimals, percent in NUMBER.findall(cell)
        if float(text.replace(",", "")) not in printed(files, len(decimals), 100 if percent else 1)
    ]

    assert wrong == []


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


def freshness_line() -> Iterator[str]:
    """Events, and when they were visible."""
    run = result("freshness")
    latencies = f"p50 {run['p50_ms']:.0f} ms, p99 {run['p99_ms']:.0f} ms"
    yield f"{run['num_events']} events under load, accepted until visible in `Recommend`: {latencies}"


def seen_items_line() -> Iterator[str]:
    """What Yelp's student has by seen items."""
    (row,) = result("quality-yelp")["seen_items"]
    yield f"the student has {row['ndcg10']:.4f} with seen items and {row['other_ndcg10']:.4f} without ({row['difference']:+.4f}, {row['low']:+.4f} to {row['high']:+.4f})"


def deep_codes_words() -> Iterator[str]:
    """The codes and the decoder's size."""
    first = result("quality-beauty-codes")["runs"][0]
    yield f"each item three codes of {' x '.join(map(str, first['level_sizes']))}"
    yield f"the decoder of {first['num_parameters']['decoder']['all']:,} parameters"


def cold_words() -> Iterator[str]:
    """How many items were held out."""
    run = result("cold-items")
    yield f"{run['num_cold_items']} of {run['num_items']:,} items, {run['num_cases']:,} events of theirs, and {run['num_ordinary_cases']:,} of trained items"


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


def kept_by_kinds_of_keys() -> Iterator[str]:
    """How many of the ten best one-byte keys and values keep."""
    kept = {row["kv_kind"]: f"{100 * row['overlap@10']:.1f} %" for row in result("kv-kinds")["rankings"]}
    yield f"keep {kept['int8']} of the ten best on MovieLens; fp8 {kept['fp8']}"


def store_words() -> Iterator[str]:
    """The bytes of a user's rows in the feature store."""
    kinds = result("capacity")["store"]["by_kind"]
    yield f"A history takes {kinds['history']['mean_bytes']:,} bytes, the mean over MovieLens' {kinds['history']['rows']} users"
    yield f"A stored list of 100 items takes {kinds['list']['mean_bytes']:,} bytes"


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


def readme_lines() -> Iterator[str]:
    """The six numbers of README."""
    rest = {case["tier"]: case for case in result("serve")["cases"] if case["door"] == "rest"}
    num, met = share_in_time()
    freshness, quality = result("freshness"), result("quality")["rows"]
    models = {row["model"]: row for row in quality if row["split"] == "leave-one-out"}
    engine = {(row["name"], row["engine"]): row for row in result("engine")["cases"]}
    for name, tier in (("student", "student"), ("LLM", "llm")):
        yield f"| {name} over REST, p50 / p99 | {rest[tier]['p50_ms']:.1f} / {rest[tier]['p99_ms']:.1f} ms |"
    yield f"| answers within a deadline of 50 ms | {met:.2f} % of {num:,} |"
    yield f"| event accepted until visible in an answer, p50 / p99 | {freshness['p50_ms']:.0f} / {freshness['p99_ms']:.0f} ms |"
    hits = (f"{models[name]['hr10']:.4f}" for name in ("decoder", "student", "item_knn"))
    yield f"| HR@10 on MovieLens-100k, decoder / student / item-kNN | {' / '.join(hits)} |"
    ratios = (f"{engine['beams-32', name]['ratio_to_best_peer']:.2f}x" for name in ("tailrace", "tailrace-int8"))
    yield f"| 32 beams a request against vLLM's CPU build, bf16 / int8 | {' / '.join(ratios)} |"


PAGES = {
    "README.md": (readme_lines,),
    "docs/benchmarks.md": (
        serve_ratios,
        freshness_line,
        seen_items_line,
        deep_codes_words,
        cold_words,
        engine_shares,
        curve_and_count_words,
        kept_by_kinds_of_keys,
        fault_words,
        fault_page,
        text_words,
    ),
    "docs/capacity.md": (store_words,),
}
PRINTED = [(page, lines) for page, sources in PAGES.items() for lines in sources]


@pytest.mark.parametrize(("page", "lines"), PRINTED, ids=[lines.__name__ for _, lines in PRINTED])
def test_pages_print_what_is_on_file(page: str, lines: Callable[[], Iterator[str]]) -> None:
    """Numbers within sentences, wherever the page breaks its lines, and tables that are not the file's rows."""
    text = " ".join((ROOT / page).read_text().split())
    wanted = [" ".join(words.split()) for words in lines()]

    assert wanted
    assert [words for words in wanted if words not in text] == []
