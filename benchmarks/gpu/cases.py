"""The engine's cases on a GPU, in this process: beams of the Qwen3-1.7B shape, or texts, also of Llama-3-8B.

    python -m benchmarks.gpu.cases beams|text|beams-product|foreign cuda OUT --limit-s SECONDS [--tiny]

Each case runs once to load its kernels, then in rounds while time allows. OUT is written after each run, in the form of
`benchmarks.engine`. `beams-product` uses the product's limits, the other groups the best limits for each case.
"""

import argparse
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.cases import Case, ShapeCases, draw_prompts, foreign_shape_cases, shape_cases
from benchmarks.engine.report import Measured, case_rows, lines, roofline_rows
from benchmarks.engine.tailrace import TailraceEngine
from benchmarks.load.command import write_report

_ENGINE = "tailrace"
_ROUNDS = 5
_MARGIN_S = 15.0
"""Reserved for the start of the process and the end of the last run."""
_WORDS = range(256)
_WARM_UP_SEQUENCES, _WARM_UP_TOKENS = 16, 8


def main() -> None:
    """Measure group by group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["beams", "text", "beams-product", "foreign"])
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    until_s = time.monotonic() + options.limit_s - _MARGIN_S
    groups = groups_of(options.part, tiny=options.tiny)
    report: dict[str, Any] = {"part": options.part, "groups": []}
    for index, group in enumerate(groups):
        share_s = (until_s - time.monotonic()) / (len(groups) - index)
        measure(group, options.device, report, options.out, time.monotonic() + share_s)
    for measured_group in report["groups"]:
        print(*lines({"cases": measured_group["cases"], "absent_peers": {}, "failed": {}}), sep="\n")
    failed = [row["name"] for measured_group in report["groups"] for row in measured_group["cases"] if "error" in row]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def groups_of(part: str, *, tiny: bool) -> Sequence[ShapeCases]:
    """Return the groups of a part; for beams, all batches of the short context, and the long context separately."""
    if part == "foreign":
        return [foreign_shape_cases(tiny=tiny)]
    beams, *texts = shape_cases(tiny=tiny, as_product=part == "beams-product")
    if part == "text":
        return texts
    short = min(case.prompt_len for case in beams.cases)
    return [replace(beams, cases=tuple(case for case in beams.cases if case.prompt_len == short or case.batch == 1))]


def measure(group: ShapeCases, device: str, report: dict[str, Any], out: Path, until_s: float) -> None:
    """Run the cases of one engine round by round, and add its rows to the report after each run."""
    has_beams = any(case.width for case in group.cases)
    began_s = time.monotonic()
    engine = TailraceEngine(
        {
            "model": f"shape:{group.shape}",
            "device": device,
            "dtype": "bfloat16",
            "threads": len(os.sched_getaffinity(0)),
            "config": {**group.config, "cpu_kernels": "torch"},
            "has_catalogue": has_beams,
            "catalogue": {"level_size": group.level_size},
        }
    )
    row = {"shape": group.shape, **engine.describe(), "ready_s": round(time.monotonic() - began_s, 1)}
    limits = engine.answer({"do": "limits", "effort": 2 if device == "cuda" else 1})
    measured = [Measured(case, _ENGINE) for case in group.cases]
    report["groups"].append(row)
    took_s: dict[str, float] = {}
    for round_number in range(-1, _ROUNDS):
        for measurement in measured:
            if measurement.error is None and time.monotonic() + 1.1 * took_s.get(measurement.case.name, 0.0) < until_s:
                took_s[measurement.case.name] = _run(engine, measurement, round_number, limits)
                row |= {"cases": case_rows(measured, []), "roofline": roofline_rows(measured)}
                write_report(out, report)
    del engine
    gc.unfreeze()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _run(engine: TailraceEngine, measurement: Measured, round_number: int, limits: dict[str, float]) -> float:
    """Run a case once, unrecorded in round -1; return its seconds."""
    case = _warm_up_of(measurement.case) if round_number < 0 else measurement.case
    began_s = time.monotonic()
    try:
        reply = engine.answer(case.ask(draw_prompts(case, _WORDS, round_number)))
    except Exception as error:  # noqa: BLE001 - one case's failure costs no other's results
        measurement.error = f"{type(error).__name__}: {error}"
        return 0.0
    seconds = time.monotonic() - began_s
    if round_number >= 0:
        measurement.runs.append({**reply, "seconds": seconds, "limits": limits})
        print(f"{case.name}: {case.value(seconds):.4g} {case.unit}", flush=True)
    return seconds if round_number >= 0 else 0.0


def _warm_up_of(case: Case) -> Case:
    """Return the case, cutting a long text to a few sequences and tokens."""
    if not case.lengths:
        return case
    lengths = tuple((prompt_len, min(new, _WARM_UP_TOKENS)) for prompt_len, new in case.lengths[:_WARM_UP_SEQUENCES])
    return replace(case, lengths=lengths, batch=len(lengths))


if __name__ == "__main__":
    main()
