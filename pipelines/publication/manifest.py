"""A bundle's manifest, without version, hashes and the student's serving form: models, gate results and lineage."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from models.files import file_sha256
from models.registry.bundle import Bundle
from pipelines.codes.tokenize import read_codes_report
from pipelines.declaration import named_values
from pipelines.evaluation.evaluate import read_report
from pipelines.evaluation.gain import llm_pays
from pipelines.evaluation.held_out import HeldOut
from pipelines.foreign.model import ImportedModel
from pipelines.options import PipelineOptions
from pipelines.publication.judge import Judgement
from pipelines.runner.stage import StageOutput
from pipelines.training.recipes import Recipe
from pipelines.training.train_decoder import read_training
from pipelines.training.train_student import read_earned
from services.features.schema import SERVICE

_FLAT = {"recipes", "team", "reporting"}
"""Fields of the options that the lineage lists otherwise: the recipe chosen, and the options of both groups."""
_KEPT_METRICS = ("hr@10", "ndcg@10", "coverage@10", "calibration@10")
"""Keys of each model's metrics in the manifest."""
_KEPT_MODELS = ("decoder", "student", "mixed_decoder", "mixed_student", "unlearned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Lineage of a bundle's models.

    It has the stages so far by name, the gate's results, the recipe and options of the run, its command, and a hash of
    its sources.
    """

    made: Mapping[str, StageOutput]
    judgement: Judgement
    held_out: HeldOut
    recipe: Recipe
    options: PipelineOptions
    command: str
    code: str
    imported: ImportedModel | None = None
    parent: Bundle | None = None
    """Of an adapter: the bundle whose decoder it changes."""


def manifest_of(origin: Origin) -> dict[str, Any]:
    """Return the manifest (JSON values)."""
    folders = {name: output.path for name, output in origin.made.items()}
    imported = origin.imported
    training = read_training(folders["train" if imported is None else "import"])
    parents = {"started_from": training["started_from"], **origin.judgement.parents()}
    report = read_report(folders["evaluate"])
    about = about_models(
        report,
        training,
        origin.recipe.prompt,
        read_codes_report(folders["tokenize"])["depth"],
        origin.options.llm_price_ndcg_per_ms,
    )
    return (
        about
        | (about_import(imported, about["llm_pays"], report) if imported is not None else {})
        | {"distillation": read_earned(folders["distill"])}
        | origin.judgement.record()
        | (_about_adapter(origin) if origin.parent is not None else {})
        | {"test_set": origin.held_out.record(), "lineage": _lineage(origin, parents)}
    )


def _about_adapter(origin: Origin) -> dict[str, Any]:
    assert origin.parent is not None, "only an adapter has a parent"
    options = origin.options.adapter
    return {"adapter": {"of": origin.parent.version, "rank": options.adapter_rank, "alpha": options.adapter_alpha}}


def about_models(
    report: dict[str, Any],
    training: dict[str, Any],
    prompt: dict[str, int],
    depth: int,
    llm_price_ndcg_per_ms: float,
) -> dict[str, Any]:
    """Return the manifest's content on the models, without the gate's results and the lineage."""
    return {
        "dataset": report["dataset"],
        "feature_service": SERVICE,
        "prompt": prompt,
        "depth": depth,
        "repeats": report["repeats"],
        "mixer": report["mixer"]["mixer"] | {"earned": report["mixer"]["earned"]},
        "llm_pays": llm_pays(report["gain"], llm_price_ndcg_per_ms),
        "llm_price_ndcg_per_ms": llm_price_ndcg_per_ms,
        "decoder_ms": {row["slice"]: row["decoder_ms"] for row in report["gain"] if "decoder_ms" in row},
        "num_items": report["num_items"],
        "num_parameters": training["num_parameters"],
        "training": {"num_tokens": training["num_tokens"]} | training["speed"],
        "multiply_adds": report["multiply_adds"],
        "metrics": {
            name: {metric: report["metrics"][name][metric] for metric in _KEPT_METRICS}
            for name in _KEPT_MODELS
            if name in report["metrics"]
        },
    }


def about_import(
    imported: ImportedModel, llm_pays: Sequence[tuple[int, int | None]], report: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest's content on an imported decoder. Labels that it may have seen earn it no routing."""
    has_seen = bool(report["metrics"]["decoder"]["may_have_seen_labels"])
    about = {name: imported.about[name] for name in ("imported", "prompt", "search")}
    return about | {"llm_pays": [] if has_seen else list(llm_pays), "may_have_seen_labels": has_seen}


def _lineage(origin: Origin, parents: dict[str, str | None]) -> dict[str, Any]:
    """Return a bundle's lineage: hashes of its data, of the sources and of each stage's inputs, options and parents."""
    ingested = origin.made["ingest"].path
    tables = ("events.parquet", "dislikes.parquet", "items.parquet")
    descent: dict[str, str] = {}
    if origin.parent is not None:
        version, before = origin.parent.version, origin.parent.lineage
        parents = {**parents, "optimised_from": version}
        descent = {"optimised_from": version, "training": before.get("training") or version}
    return descent | {
        "data": {name: file_sha256(ingested / name) for name in tables},
        "code": origin.code,
        "options": _options(origin),
        "seed": origin.recipe.train.seed,
        "parents": parents,
        "stages": {name: output.key for name, output in origin.made.items()},
        "command": origin.command,
    }


def _options(origin: Origin) -> dict[str, Any]:
    """Return the run's options as JSON values, those of its groups by their own names."""
    groups = (origin.options.team, origin.options.reporting)
    options = {name: value for name, value in asdict(origin.options).items() if name not in _FLAT}
    options |= {name: value for group in groups for name, value in named_values(group).items()}
    options |= {"dataset": origin.options.data_name, "recipe": asdict(origin.recipe)}
    as_json: dict[str, Any] = json.loads(json.dumps(options, default=str))
    return as_json
