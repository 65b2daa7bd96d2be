"""The engines of one run: started, warmed up, run case by case in alternation, stopped.

Engines load one after another and stay idle while another runs. A case at which an engine fails is recorded with its
error and not run again; an engine that does not start is recorded too, and does not affect other engines' results.
"""

import json
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.engine.cases import Case, draw_prompts
from benchmarks.engine.process import ROOT, EngineFailed, EngineProcess, Entry, our_entry, peer_entry, reference_entry
from benchmarks.engine.report import Measured

OURS = "tailrace"
_INT8 = f"{OURS}-int8"
_TEXT_ONLY = frozenset({"llamacpp"})
"""Peers without beam search."""
_ENOUGH_S = 0.6
_MAX_RUNS_A_ROUND = 3
_RUNS_APART = 10
_REFERENCE_CASE = "decode-8"
_LIMITS = {"do": "limits", "effort": 2}


class Comparison:
    """The engines' measurements in one run of the benchmark."""

    def __init__(self, device: str, threads: int, rounds: int) -> None:
        self._device, self._threads, self._rounds = device, threads, rounds
        self.measured: list[Measured] = []
        self.described: dict[str, dict[str, Any]] = {}
        self.absent: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.quality: dict[str, dict[str, float]] = {}

    @property
    def peers(self) -> list[str]:
        """The peers that were measured."""
        return [name for name in self.described if not name.startswith(OURS)]

    @property
    def device(self) -> str:
        """The device that our engine reports."""
        return str(self.described.get(OURS, {}).get("device", "unknown"))

    def compare(self, folder: Path, peers: Sequence[str], cases: Sequence[Case]) -> None:
        """Run these cases on all engines with one checkpoint, and compare their outputs with the reference."""
        model, device, threads = str(folder), self._device, self._threads
        entries = {OURS: our_entry(model, device, threads, {})}
        if device == "cpu":
            entries[_INT8] = our_entry(model, device, threads, {"weight_kind": "int8"})
        for name in peers:
            entry = peer_entry(name, model, device, threads)
            if entry is None:
                self.absent[name] = "not installed: run `make bench-peers`"
            else:
                entries[name] = entry
        self.run(entries, cases, words_of(folder))
        if "transformers" in entries:
            self._compare_with_reference(model)

    def run(self, entries: dict[str, Entry], cases: Sequence[Case], words: Sequence[int]) -> None:
        """Run these cases on these engines, with prompts of these tokens."""
        begin = _announced(len(entries) * (1 + len(cases) * (self._rounds + 1)))
        engines = self._start(entries, begin)
        try:
            self.measured = measured = [
                Measured(case, name) for case in cases for name in engines if not (case.width and name in _TEXT_ONLY)
            ]
            for measurement in measured:
                begin(f"warming up {measurement.case.name} on {measurement.engine}")
                _warm_up(engines[measurement.engine], measurement, words)
            for round_number in range(self._rounds):
                for measurement in measured if round_number % 2 == 0 else reversed(measured):
                    begin(f"round {round_number + 1}: {measurement.case.name} on {measurement.engine}")
                    _run_round(engines[measurement.engine], measurement, words, round_number)
        finally:
            for engine in engines.values():
                engine.stop()

    def _start(self, entries: dict[str, Entry], begin: Callable[[str], None]) -> dict[str, EngineProcess]:
        engines = {}
        for name, entry in entries.items():
            begin(f"loading {name}")
            engine = EngineProcess(entry)
            try:
                engine.wait_until_ready()
            except EngineFailed as error:
                engine.stop()
                self.failed[name] = f"does not start: {error}"
            else:
                engines[name] = engine
                self.described[name] = engine.described
        return engines

    def _compare_with_reference(self, model: str) -> None:
        reference = EngineProcess(reference_entry(model, self._threads))
        try:
            reference.wait_until_ready()
            for measurement in (
                measurement
                for measurement in self.measured
                if measurement.case.name == _REFERENCE_CASE and measurement.runs
            ):
                reply = reference.ask(
                    {"prompts": measurement.runs[0]["prompts"], "outputs": measurement.runs[0]["outputs"]}
                )
                self.quality[measurement.engine] = {name: value for name, value in reply.items() if name != "seconds"}
        except EngineFailed as error:
            self.failed["fp32 reference"] = str(error)
        finally:
            reference.stop()


def _announced(total: int) -> Callable[[str], None]:
    """Return a function that prints a line at the start of each of `total` steps: a bare machine cannot draw bars."""
    numbers = count(1)
    return lambda what: print(f"{next(numbers)}/{total} {what}", file=sys.stderr, flush=True)


def _warm_up(engine: EngineProcess, measurement: Measured, words: Sequence[int]) -> None:
    """Run a case once without recording it."""
    try:
        engine.ask(measurement.case.ask(draw_prompts(measurement.case, words, -1)))
    except EngineFailed as error:
        measurement.error = str(error)


def _run_round(engine: EngineProcess, measurement: Measured, words: Sequence[int], round_number: int) -> None:
    """Run a case until enough time is spent, with new prompts each time."""
    spent_s = 0.0
    for repeat in range(_MAX_RUNS_A_ROUND):
        if measurement.error is not None or spent_s > _ENOUGH_S:
            break
        prompts = draw_prompts(measurement.case, words, _RUNS_APART * round_number + repeat)
        try:
            run = _run_beside_limits(engine, measurement, measurement.case.ask(prompts))
        except EngineFailed as error:
            measurement.error = str(error)
        else:
            measurement.runs.append({**run, "prompts": prompts})
            spent_s += run["seconds"]


def _run_beside_limits(engine: EngineProcess, measurement: Measured, ask: dict[str, Any]) -> dict[str, Any]:
    """Run once. For our engine, measure the machine's limits before and after; the higher value counts."""
    if not measurement.engine.startswith(OURS):
        return engine.ask(ask)
    before, run, after = engine.ask(_LIMITS), engine.ask(ask), engine.ask(_LIMITS)
    return {**run, "limits": {name: max(before[name], after[name]) for name in ("bytes_per_s", "flops_per_s")}}


def words_of(model: Path) -> Sequence[int]:
    """Return the tokens of README and docs, or the vocabulary's range if the checkpoint has no tokenizer."""
    path = model / "tokenizer.json"
    if not path.exists():
        return range(int(json.loads((model / "config.json").read_text())["vocab_size"]))
    from tokenizers import Tokenizer

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    tokens: list[int] = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    return tokens
