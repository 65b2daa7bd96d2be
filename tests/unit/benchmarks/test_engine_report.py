"""The engine benchmark's report: medians, ratios, fractions of limits, agreement."""

from typing import Any

from benchmarks.engine.cases import Case
from benchmarks.engine.report import Measured, case_rows, roofline_rows

WRITE = Case(name="decode-2", unit="output tokens/s", batch=2, prompt_len=4, num_new=5)
WAIT = Case(name="wait", unit="ms", batch=1, prompt_len=4, width=2)
PEERS = ["transformers", "vllm"]


def measured(case: Case, engine: str, *seconds: float, outputs: Any = ()) -> Measured:
    """Build an engine's runs of a case."""
    return Measured(case, engine, [{"seconds": one, "outputs": list(outputs)} for one in seconds])


def test_the_median_and_the_best_peer() -> None:
    """The ratio compares with the fastest peer of the case; above 1 is faster, also for times in milliseconds."""
    runs = (
        measured(WRITE, "tailrace", 0.5, 9.0, 0.4),
        measured(WRITE, "transformers", 1.0),
        measured(WRITE, "vllm", 2.0),
    )
    rows = case_rows(runs, PEERS)

    assert [(row["engine"], row["value"], row["ratio_to_best_peer"]) for row in rows] == [
        ("tailrace", 20.0, 2.0),
        ("transformers", 10.0, 1.0),
        ("vllm", 5.0, 0.5),
    ]
    assert rows[0]["runs"] == [20.0, 1.111, 25.0]
    timed = case_rows([measured(WAIT, "tailrace", 0.01), measured(WAIT, "vllm", 0.02)], PEERS)
    assert timed[0]["ratio_to_best_peer"] == 2.0


def test_steps_are_compared_with_the_limits_of_their_run() -> None:
    """The row shows the run with the median fraction and the binding limit; each run has its own limits."""
    one = measured(WRITE, "tailrace", 1.0, 1.0, 1.0)
    for run, seconds, bytes_per_s in zip(one.runs, (8.0, 2.0, 1.0), (100.0, 100.0, 110.0), strict=True):
        run["steps"] = {"decode": {"steps": 2, "seconds": seconds, "num_bytes": 100.0, "flops": 30.0}}
        run["limits"] = {"bytes_per_s": bytes_per_s, "flops_per_s": 150.0}

    rows = roofline_rows([one])

    row = rows[0]
    assert (row["case"], row["engine"], row["step"], row["step_ms"]) == ("decode-2", "tailrace", "decode", 1000.0)
    assert (row["limit_gbytes_per_s"], row["limit_tflops_per_s"]) == (1e-07, 1.5e-10)
    assert (row["memory_share"], row["compute_share"]) == (0.5, 0.1)
    assert (row["bound_by"], row["share_of_limit"]) == ("memory", 0.5)
