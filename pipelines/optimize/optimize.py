"""Optimises one published bundle: make variants by recipes, measure them under serving conditions, judge, publish.

    parent -> recipes -> measure -> judge -> publish -> (promote)

A variant without a win is a row of the table with the reason, and is not published. A child is promoted only on
request, within the budget, and while its parent is still live; `tailrace rollback` then works as for any bundle.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.prompt import prompt_of
from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from pipelines.evaluation.held_out import HeldOut
from pipelines.optimize import choice, report
from pipelines.optimize.children import PICTURE, Winner, judged_bundle, make_decoders, write_child
from pipelines.optimize.choice import WORTH, VariantDecision, VariantRow, Worth
from pipelines.optimize.exports import OnnxVariant, write_onnx
from pipelines.optimize.measure import MeasuredVariant, Ranker, Speed, ranked, speeds
from pipelines.optimize.parent import Parent, open_parent
from pipelines.optimize.recipes import RECIPES, VariantRecipe
from pipelines.places import Places
from pipelines.publication.bundle import BY, version_of
from pipelines.runner.bars import Bars
from pipelines.runner.run_lock import run_lock
from pipelines.runner.stage import StageCache

PARENT = "parent"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeOptions:
    """The variants to try, and the conditions for promotion.

    Args:
        recipes: The variants to make.
        budget: The fraction of NDCG@10 that may be lost.
        worth: Requirements of a win.
        dtype: Of the engine's arithmetic.
        promotes: Whether the best winner replaces its parent as the live version.
        epochs: Of each recipe's fit; None: its own number.
        command: The running command, for the record of the test labels' openings.
    """

    recipes: tuple[VariantRecipe, ...] = RECIPES
    budget: float = 0.01
    worth: Worth = WORTH
    dtype: torch.dtype = torch.float32
    promotes: bool = False
    epochs: int | None = None
    command: str = "tailrace optimize"


@dataclass(frozen=True, slots=True)
class Optimised:
    """The table, children published by recipe, the promoted version, if any, and each user's NDCG@10, by variant."""

    parent: VariantRow
    rows: tuple[VariantRow, ...]
    verdicts: Mapping[str, VariantDecision]
    children: Mapping[str, Bundle]
    live: str | None
    gains: Mapping[str, np.ndarray]


def optimize(version: str, options: OptimizeOptions, places: Places, console: Console) -> Optimised:
    """Make, measure and publish the variants of a bundle, and show them.

    Raises:
        ConfigError: Its training is unknown or removed.
        BundleNotFound: The bundle does not exist.
        BundleCorrupt: The bundle is damaged.
        BundleMoved: A child may be promoted, and its parent is not live.
        BundleWithdrawn: The bundle was withdrawn.
    """
    store = BundleStore.of(places)
    with run_lock(places.stages_dir, console), tempfile.TemporaryDirectory() as folder:
        parent, scratch = open_parent(store.open(version), places.stages_dir), Path(folder)
        if parent.depth > 1 and any(recipe.weight_kind is None for recipe in options.recipes):
            console.print(
                f"exports are skipped: an item has {parent.depth} tokens, and only the engine ranks such items",
                markup=False,
            )
            options = replace(
                options, recipes=tuple(recipe for recipe in options.recipes if recipe.weight_kind is not None)
            )
        kinds = {PARENT: parent.bundle.weight_kind} | {recipe.name: recipe.weight_kind for recipe in options.recipes}
        with Bars(console) as bars:
            made, cache = {}, StageCache(places.stages_dir)
            for recipe in options.recipes:
                made[recipe.name] = make_decoders(parent, recipe, cache, options.epochs, bars.begin(recipe.name))
            cases = HeldOut(parent.tokenized, places.stages_dir, options.command).open(f"variants of {version}")
            variants, gains = _variants(parent, kinds, made, options.dtype, scratch), {}
            for name, variant in variants.items():
                about = _about(parent, name, kinds[name], made.get(name), options.dtype)
                gains[name] = ranked(variant, cases, cache, about, bars.begin(f"rank {name}"))
            timed = speeds(variants, cases)
        base, *rows = (
            _row(name, kind, gains[name], gains[PARENT], timed[name], variants[name].weight_bytes)
            for name, kind in kinds.items()
        )
        verdicts = choice.judge(base, rows, options.budget, options.worth)
        for shown in report.terminal(base, rows, verdicts):
            console.print(shown)
        children = _publish(store, parent, options.recipes, made, (base, rows, verdicts), scratch)
        live = _promote(store, version, choice.best(rows, verdicts), children) if options.promotes else None
    for name, child in children.items():
        console.print(f"{name}: {child.version}{' is live' if child.version == live else ''}", markup=False)
    return Optimised(base, tuple(rows), verdicts, children, live, gains)


def _variants(
    parent: Parent,
    kinds: Mapping[str, str | None],
    made: Mapping[str, Path | None],
    dtype: torch.dtype,
    scratch: Path,
) -> dict[str, Ranker]:
    """Return the parent and its variants, each in an engine or, without a weight kind, in ONNX Runtime."""
    store = BundleStore(scratch / "judged")
    variants: dict[str, Ranker] = {}
    for name, kind in kinds.items():
        if kind is None:
            variants[name] = _exported(parent, scratch / f"{name}.onnx")
            continue
        bundle = judged_bundle(parent, name, kind, made.get(name), store, scratch / f"judged-{name}")
        variants[name] = MeasuredVariant(bundle, dtype, repeats=parent.repeats)
    return variants


def _exported(parent: Parent, path: Path) -> OnnxVariant:
    """Write the judged decoder as an ONNX graph.

    Items must have one token: deeper codes need beams, which a graph lacks.
    """
    catalogue = load_catalogue(parent.bundle.judged_dir / "catalogue.parquet")
    write_onnx(load_decoder(parent.bundle.judged_dir / "decoder", torch.float32, "cpu"), path)
    return OnnxVariant(path, catalogue, prompt_of(parent.bundle.manifest), repeats=parent.repeats)


def _about(parent: Parent, name: str, kind: str | None, made: Path | None, dtype: torch.dtype) -> dict[str, Any]:
    """Return the inputs of a variant's lists, except the sources."""
    recipe = "" if made is None else made.name
    files = {
        file: digest
        for file, digest in parent.bundle.manifest["files"].items()
        if "decoder/" in file or "catalogue" in file
    }
    about = {
        "variant": name,
        "kind": kind,
        "made": recipe,
        "files": files,
        "dtype": str(dtype),
        "repeats": parent.repeats,
    }
    return about | {"prompt": parent.bundle.manifest["prompt"], "examples": parent.tokenized.name}


def _row(
    name: str, weight_kind: str | None, gains: np.ndarray, parent_gains: np.ndarray, speed: Speed, weight_bytes: int
) -> VariantRow:
    difference, low, high = choice.relative_difference(gains, parent_gains)
    return VariantRow(
        name=name,
        weight_kind=weight_kind,
        ndcg=float(gains.mean()),
        difference=difference,
        low=low,
        high=high,
        request_ms=speed.request_ms,
        tokens_per_s=speed.tokens_per_s,
        weight_bytes=weight_bytes,
    )


def _publish(
    store: BundleStore,
    parent: Parent,
    recipes: tuple[VariantRecipe, ...],
    made: Mapping[str, Path | None],
    measured: tuple[VariantRow, list[VariantRow], Mapping[str, VariantDecision]],
    scratch: Path,
) -> dict[str, Bundle]:
    base, rows, verdicts = measured
    picture, now, children = scratch / PICTURE, datetime.now(UTC), {}
    report.draw(base, rows, verdicts, picture)
    shown = f"{report.markdown(base, rows, verdicts)}\n\n![NDCG@10 by time]({PICTURE})"
    for recipe, row in zip(recipes, rows, strict=True):
        if verdicts[row.name].wins:
            title = f"# {parent.bundle.version} by the recipe {recipe.name}\n\nRecipe: {recipe.what}."
            winner, folder = Winner(recipe, row, made[recipe.name]), scratch / recipe.name
            about = write_child(parent, winner, f"{title}\n\n{shown}", picture, folder)
            children[recipe.name] = store.publish(folder, version_of(folder, now), about)
    return children


def _promote(store: BundleStore, parent: str, winner: VariantRow | None, children: Mapping[str, Bundle]) -> str | None:
    """Promote the best winner over its parent, and return its version; None without a winner."""
    if winner is None:
        return None
    version = children[winner.name].version
    store.promote(version, parent, by=BY)
    return version
