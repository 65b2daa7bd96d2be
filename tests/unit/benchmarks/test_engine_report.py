"""The engine benchmark's report: medians, ratios, shares of limits, agreement, and the page's tables."""

from typing import Any

import pytest

from benchmarks.engine.cases import Case
from benchmarks.engine.report import Measured, agreements, best_limits, case_rows, roofline_rows
from benchmarks.engine.table import tables

WRITE = Case(name="decode-2", unit="output tokens/s", batch=2, prompt_len=4, num_new=5)
RANK = Case(name="beams-2", unit="requests/s", batch=1, prompt_len=4, width=2)
WAIT = Case(name="wait", unit="ms", batch=1, prompt_len=4, width=2)
REPORT = {"device": "a processor", "threads": 2, "date": "2026-11-21", "model": "m", "dtype": "bfloat16"}
PEERS = ["transformers", "vllm"]


def measured(case: Case, engine: str, *seconds: float, outputs: Any = ()) -> Measured:
    """Build one engine's runs of a case."""
    return Measured(case, engine, [{"seconds": one, "outputs": list(outputs)} for one in seconds])


def test_the_median_and_the_best_peer() -> None:
    """A ratio is to the fastest peer of that case; above 1 is faster, and half its milliseconds are a ratio of 2."""
    rows = case_rows(
        [
            measured(WRITE, "tailrace", 0.5, 9.0, 0.4),
            measured(WRITE, "transformers", 1.0),
            measured(WRITE, "vllm", 2.0),
        ],
        PEERS,
    )

    assert [(row["engine"], row["value"], row["ratio_to_best_peer"]) for row in rows] == [
        ("tailrace", 20.0, 2.0),
        ("transformers", 10.0, 1.0),
        ("vllm", 5.0, 0.5),
    ]
    assert rows[0]["runs"] == [20.0, 1.111, 25.0]
    timed = case_rows([measured(WAIT, "tailrace", 0.01), measured(WAIT, "vllm", 0.02)], PEERS)
    assert timed[0]["ratio_to_best_peer"] == 2.0


def test_a_failed_case_has_its_error() -> None:
    """A case without runs has its error instead of a value, and no engine is compared with it."""
    failed = Measured(RANK, "vllm", error="ValueError: no")

    rows = case_rows([measured(RANK, "tailrace", 0.5), failed], PEERS)

    assert rows[0]["ratio_to_best_peer"] is None
    assert (rows[1]["value"], rows[1]["error"]) == (None, "ValueError: no")


def test_steps_are_compared_with_the_limits_of_their_run() -> None:
    """The row is of the run with the median share; the nearer limit binds. A slow step during a slow memory is no worse."""
    one = measured(WRITE, "tailrace", 1.0, 1.0, 1.0)
    for run, seconds, bytes_per_s in zip(one.runs, (8.0, 2.0, 1.0), (100.0, 100.0, 110.0), strict=True):
        run["steps"] = {"decode": {"steps": 2, "seconds": seconds, "num_bytes": 100.0, "flops": 30.0}}
        run["limits"] = {"bytes_per_s": bytes_per_s, "flops_per_s": 150.0}

    rows = roofline_rows([one])

    assert best_limits([one, measured(WRITE, "vllm", 1.0)]) == {"bytes_per_s": 110.0, "flops_per_s": 150.0}

    assert rows[0] | {"step_mbytes": 0} == {
        "case": "decode-2",
        "engine": "tailrace",
        "step": "decode",
        "step_ms": 1000.0,
        "step_mbytes": 0,
        "step_gflops": 1.5e-08,
        "limit_gbytes_per_s": 1e-07,
        "limit_tflops_per_s": 1.5e-10,
        "memory_share": 0.5,
        "compute_share": 0.1,
        "bound_by": "memory",
        "share_of_limit": 0.5,
    }


def test_agreement_is_counted_place_by_place_or_as_sets() -> None:
    """Texts agree by position, items by membership."""
    runs = [
        measured(WRITE, "tailrace", 1.0, outputs=[[1, 2, 3, 4], [5, 6, 7, 8]]),
        measured(WRITE, "transformers", 1.0, outputs=[[1, 2, 9, 9], [5, 6, 7, 8]]),
        measured(RANK, "tailrace", 1.0, outputs=[[[1, 2, 3], [4, 5, 6]]]),
        measured(RANK, "transformers", 1.0, outputs=[[[4, 5, 6], [7, 8, 9]]]),
    ]

    found = {(row["case"], row["engine"]): row["share"] for row in agreements(runs)}

    assert found == {("decode-2", "tailrace"): 0.75, ("beams-2", "tailrace"): 0.5}


@pytest.mark.parametrize(
    "quality", [{}, {"tailrace": {"best_share": 1.0, "largest_gap": 0.0, "logits_max_error": 9e-5}}]
)
def test_the_page(quality: dict[str, Any]) -> None:
    """The page has tables with device and date, and names absent peers."""
    one = measured(WRITE, "tailrace", 0.5)
    report = REPORT | {
        "cases": case_rows([one, measured(WRITE, "transformers", 1.0)], PEERS),
        "roofline": [],
        "limits": {"bytes_per_s": 24e9, "flops_per_s": 2.3e12},
        "absent_peers": {"vllm": "not installed: run `make bench-peers`"},
        "engines": {"transformers": {"constraint": "held to the catalogue by a processor"}},
        "quality": quality,
    }

    page = tables(report)

    assert "a processor, 2 threads, 2026-11-21, m in bfloat16" in page
    assert "| decode-2 | output tokens/s | 20 | 10 | 2.00x |" in page
    assert "- vllm: not installed: run `make bench-peers`" in page
    assert "24.0 GB/s read, 2.30 TFLOP/s" in page
    assert ("| tailrace | 100.0% | 0.000 | 9.0e-05 |" in page) == bool(quality)


def test_a_run_in_which_every_case_failed() -> None:
    """Without a figure the page has the error of each case, and no limits."""
    failed = Measured(WRITE, "tailrace", error="RuntimeError: an illegal memory access")
    found = {"cases": case_rows([failed], []), "roofline": roofline_rows([failed]), "limits": best_limits([failed])}

    page = tables(REPORT | {"model": None, "absent_peers": {}, "engines": {}, "quality": {}} | found)

    assert "| decode-2 | output tokens/s | - | - |" in page
    assert "- decode-2 on tailrace: RuntimeError: an illegal memory access" in page
