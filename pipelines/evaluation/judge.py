"""Judges new models and their data before publication: against the baselines, each other, and what is live.

Models are judged once by the same bounds: where the live bundle has these very models, its manifest says what was found. By other bounds they are judged
again, against the bundle that they were compared with then, since they are no challenger of themselves.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.registry import Bundle, BundleStore
from pipelines.data import checks
from pipelines.evaluation import champion, evaluate, gate
from pipelines.evaluation.held_out import HeldOut
from pipelines.options import PipelineOptions
from pipelines.runner.stage import StageOutput
from services.errors import BundleError

_RECORDED = ("data", "against_live", "forced", "withdrawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was found of models and data. `problems` are beyond their bounds; `forced` are those that a publication passed over.

    Args:
        data: The facts of the data, for the manifest.
        against_live: The rows of `pipelines.evaluation.champion`.
        compared_with: The bundle that was live, None if there was none of this data.
        withdrawn: A sentence on the version that a rollback replaced by the live one, if there was one.
        bounds: The options of gate and checks (JSON values).
    """

    data: Mapping[str, Any]
    against_live: Sequence[Mapping[str, Any]]
    problems: Sequence[str]
    forced: Sequence[str]
    compared_with: str | None
    withdrawn: str | None
    bounds: Mapping[str, Any]

    def record(self) -> dict[str, Any]:
        """Return what a bundle's manifest has of it, beside its lineage."""
        return {name: getattr(self, name) for name in _RECORDED}

    def key(self) -> dict[str, Any]:
        """Return what a publication states of its gate: bundles that differ in it are two, though their models are the same."""
        return {"bounds": self.bounds, "forced": self.forced, "compared_with": self.compared_with}


def judge(
    models: evaluate.Trained,
    held_out: HeldOut,
    evaluated: StageOutput,
    ingested: Path,
    store: BundleStore,
    live: Bundle | None,
    options: PipelineOptions,
) -> Judgement:
    """Judge what was evaluated. `live` is the bundle that these models are to replace, None without one."""
    bounds = json.loads(json.dumps({"gate": asdict(options.gate), "checks": asdict(options.checks)}))
    other = live
    if live is not None and _holds(live, evaluated):
        lineage = live.manifest["lineage"]
        compared_with = lineage["parents"]["compared_with"]
        if bounds == {name: lineage["options"].get(name) for name in bounds}:
            found: dict[str, Any] = {name: live.manifest.get(name) for name in _RECORDED}
            return Judgement(**found, problems=(), compared_with=compared_with, bounds=bounds)
        other = _open(store, compared_with)
    before = other.manifest.get("data") if other else None
    data = checks.describe(ingested, before, time.time_ns() // 1_000)
    against_live = champion.compare(models, held_out, evaluated.path, other) if other else []
    problems = gate.find_problems(evaluate.read_report(evaluated.path)["metrics"], against_live, options.gate)
    problems += checks.problems(data, before, options.checks)
    return Judgement(
        data=data,
        against_live=against_live,
        problems=problems,
        forced=problems if options.force else (),
        compared_with=other.version if other else None,
        withdrawn=left.describe() if (left := store.rolled_back()) else None,
        bounds=bounds,
    )


def _holds(bundle: Bundle, evaluated: StageOutput) -> bool:
    """Whether the bundle's models are the ones that were evaluated, and no items were added to them."""
    lineage = bundle.manifest.get("lineage", {})
    return "items_added_to" not in lineage and lineage.get("stages", {}).get("evaluate") == evaluated.key


def _open(store: BundleStore, version: str | None) -> Bundle | None:
    """Return an earlier bundle, None where it was removed meanwhile."""
    try:
        return store.open(version) if version else None
    except BundleError:
        return None
