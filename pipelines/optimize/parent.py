"""The bundle that is optimised: its decoders, the options that they were trained with, and the training's data, by what its manifest names.

Where a refit serves, there are two decoders: the one that the gate judged, whose test labels nobody has learned, and the one that serves. A recipe
is applied to both; the first is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.bundle import JUDGED, Bundle, learned_repeats
from models.catalogue import load_item_ids
from pipelines.data.examples import REFIT
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import FitOptions
from pipelines.training.train_decoder import TrainOptions
from services.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Member:
    """One decoder of a bundle: its folder below the bundle's ("" or `judged`), and the examples that it learned from."""

    name: str
    tokenized: Path


@dataclass(frozen=True, slots=True)
class Parent:
    """A verified bundle and what its decoders were trained with."""

    bundle: Bundle
    tokenized: Path
    options: TrainOptions

    @property
    def repeats(self) -> bool:
        """Whether seen items compete where it is judged."""
        return learned_repeats(self.bundle.manifest)

    @property
    def depth(self) -> int:
        """The tokens of an item."""
        return self.bundle.catalogue().depth

    @property
    def members(self) -> tuple[Member, ...]:
        """Its decoders, the judged one first."""
        if self.bundle.judged_dir == self.bundle.path:
            return (Member("", self.tokenized),)
        return Member(JUDGED, self.tokenized), Member("", self.tokenized / REFIT)


def open_parent(bundle: Bundle, stages_dir: Path) -> Parent:
    """Verify a bundle and find what it was trained with.

    Raises ConfigError where its training is unknown, its data are no longer there or it has items that they lack; BundleCorrupt.
    """
    bundle.verify()
    lineage: Mapping[str, Any] = bundle.manifest.get("lineage", {})
    key, options = lineage.get("stages", {}).get("tokenize"), _options_of(lineage.get("options", {}))
    if key is None or options is None:
        raise ConfigError(
            f"VERSION: the manifest of {bundle.version} names no training; give a version that `tailrace pipeline` published"
        )
    tokenized = stages_dir / "tokenize" / key
    if not tokenized.is_dir():
        raise ConfigError(
            f"VERSION: the training data of {bundle.version} are no longer in {tokenized}; run `tailrace pipeline` with its options again"
        )
    if load_item_ids(tokenized / "catalogue.parquet") != bundle.item_ids():
        before = lineage.get("items_added_to", "the version before its items were added")
        raise ConfigError(
            f"VERSION: {bundle.version} has items that its training data lack; optimise {before}, then add the items to the result"
        )
    return Parent(bundle, tokenized, options)


def _options_of(given: Mapping[str, Any]) -> TrainOptions | None:
    """Return what a decoder was trained with, from the options in its bundle's lineage; None where they do not say it."""
    try:
        trained = given["recipe"]["train"]
        fit = FitOptions(**{**trained["fit"], "descent": DescentOptions(**trained["fit"]["descent"])})
        return TrainOptions(**{**trained, "fit": fit})
    except (LookupError, TypeError, AttributeError):
        return None
