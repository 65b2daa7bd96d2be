"""Judges new models and their data before publication: against the baselines, the live bundle and the reference.

Models are judged once by the same bounds: if the live bundle has exactly these models, its manifest has the result.
With other bounds they are judged again, against the bundles that they were compared with then, so that they do not
challenge themselves.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from models.registry.bundle import Bundle
from models.registry.manifest import parents_of
from models.registry.store import BundleStore
from pipelines.data import checks
from pipelines.data.options import SplitKind
from pipelines.evaluation import champion, evaluate, gate
from pipelines.evaluation.held_out import HeldOut
from pipelines.options import PipelineOptions
from pipelines.publication.live import reference_of
from pipelines.runner.stage import StageOutput
from services.errors import BundleError

_NO_COMPARISON = "not compared: every bundle has learned events after the cut"
log = structlog.get_logger()

_FOUND = frozenset({"data", "against_live", "against_reference", "about_reference", "forced"})
"""Results of each judgement; a bundle that lacks any is judged again."""
_RECORDED = ("data", "against_live", "against_reference", "about_reference", "forced", "withdrawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The gate's result. `problems` are bounds violated; `forced` are violations that a forced publication ignored.

    Args:
        data: The facts of the data, for the manifest.
        against_live: The rows of `pipelines.evaluation.champion`.
        against_reference: The same for the reference.
        about_reference: A sentence on the reference's version, or why there was no comparison.
        compared_with: The live bundle of the comparison, None without a live bundle of this data.
        reference: The version of the reference, None without a reference of this data.
        withdrawn: A sentence on the version that a rollback replaced by the live version, if there was such a rollback.
        bounds: The options of gate and checks (JSON values).
    """

    data: Mapping[str, Any]
    against_live: Sequence[Mapping[str, Any]]
    against_reference: Sequence[Mapping[str, Any]]
    about_reference: str
    problems: Sequence[str]
    forced: Sequence[str]
    compared_with: str | None
    reference: str | None
    withdrawn: str | None
    bounds: Mapping[str, Any]

    def record(self) -> dict[str, Any]:
        """Return the fields recorded in a bundle's manifest, without lineage."""
        return {name: getattr(self, name) for name in _RECORDED}

    def key(self) -> dict[str, Any]:
        """Return the gate's part of a publication's key: it tells bundles with equal models apart."""
        return {"bounds": self.bounds, "forced": self.forced} | self.parents()

    def parents(self) -> dict[str, str | None]:
        """Return the bundles of the comparison, for the lineage."""
        return {"compared_with": self.compared_with, "reference": self.reference}


@dataclass(frozen=True, slots=True)
class _Others:
    """The bundles to compare with: the live one, None if there is none, and the reference or why it is absent."""

    live: Bundle | None
    reference: Bundle | None
    about_reference: str


def judge(
    models: evaluate.EvaluatedModels,
    held_out: HeldOut,
    evaluated: StageOutput,
    ingested: Path,
    store: BundleStore,
    live: Bundle | None,
    options: PipelineOptions,
) -> Judgement:
    """Judge the evaluated models. `live` is the bundle that they are to replace, None if there is none."""
    bounds = json.loads(json.dumps({"gate": asdict(options.gate), "checks": asdict(options.checks)}))
    judged = live if live is not None and _holds(live, evaluated) else None
    if judged is not None and (before := _judgement_of(judged, bounds)) is not None:
        return before
    others = _others(store, ingested, live, judged, options)
    live_data = others.live.manifest.get("data") if others.live else None
    data = checks.describe(ingested, live_data, time.time_ns() // 1_000)
    compared = _compare(models, held_out, evaluated, others)
    problems = gate.find_problems(evaluate.read_report(evaluated.path)["metrics"], compared, options.gate)
    problems += checks.problems(data, live_data, options.checks)
    return Judgement(
        data=data,
        against_live=compared.live,
        against_reference=compared.reference,
        about_reference=others.about_reference,
        problems=problems,
        forced=problems if options.force else (),
        compared_with=others.live.version if others.live else None,
        reference=others.reference.version if others.reference else None,
        withdrawn=left.describe() if (left := store.rolled_back()) else None,
        bounds=bounds,
    )


def _judgement_of(bundle: Bundle, bounds: Mapping[str, Any]) -> Judgement | None:
    """Return the judgement that a bundle's manifest records; None if its bounds were others or a result is missing."""
    parents, given = parents_of(bundle.manifest), bundle.manifest["lineage"].get("options", {})
    if bounds != {name: given.get(name) for name in bounds} or _FOUND - bundle.manifest.keys():
        return None
    recorded: dict[str, Any] = {name: bundle.manifest.get(name) for name in _RECORDED}
    compared: dict[str, Any] = {name: parents.get(name) for name in ("compared_with", "reference")}
    return Judgement(**recorded, **compared, problems=(), bounds=bounds)


def _others(
    store: BundleStore, ingested: Path, live: Bundle | None, judged: Bundle | None, options: PipelineOptions
) -> _Others:
    """Choose the bundles to compare with. `judged` is the live bundle if it has the evaluated models itself."""
    is_compared = options.split == SplitKind.LEAVE_ONE_OUT
    reference, about_reference = reference_of(store, ingested) if is_compared else (None, _NO_COMPARISON)
    if parent := options.adapter.adapter_of:
        reference, about_reference = store.open(parent), f"{parent}, whose decoder the adapter changes"
    if judged is not None and reference is not None and reference.version == judged.version:
        reference, about_reference = None, f"{about_reference}: it has these models"
    if live is not None and is_compared and reference is None:
        log.warning("reference_not_compared", why=about_reference)
    if judged is not None:
        live = _open(store, parents_of(judged.manifest).get("compared_with"))
    return _Others(live, reference, about_reference)


def _compare(
    models: evaluate.EvaluatedModels, held_out: HeldOut, evaluated: StageOutput, others: _Others
) -> gate.Compared:
    """Compare the models with each of the other bundles, with a bundle that is both once."""
    bundles = {bundle.version: bundle for bundle in (others.live, others.reference) if bundle}
    rows = {version: champion.compare(models, held_out, evaluated.path, bundle) for version, bundle in bundles.items()}
    return gate.Compared(
        live=rows[others.live.version] if others.live else [],
        reference=rows[others.reference.version] if others.reference else [],
    )


def _holds(bundle: Bundle, evaluated: StageOutput) -> bool:
    """Whether the bundle's models are the evaluated models, without added items."""
    lineage = bundle.manifest.get("lineage", {})
    return "items_added_to" not in lineage and lineage.get("stages", {}).get("evaluate") == evaluated.key


def _open(store: BundleStore, version: str | None) -> Bundle | None:
    """Return an earlier bundle, None if it was removed meanwhile."""
    try:
        return store.open(version) if version else None
    except BundleError:
        return None
