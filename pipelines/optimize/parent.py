"""The bundle to optimise: its decoders, their training options, and the training data, found by its manifest.

A refitted bundle has two decoders: the decoder that the gate judged, which has not learned the test labels, and the
serving decoder. A recipe is applied to both; the first is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.catalogue import load_item_ids
from models.registry.bundle import JUDGED, Bundle, learned_repeats
from pipelines.data.examples import REFIT
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import FitOptions
from pipelines.training.train_decoder import TrainOptions
from services.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Member:
    """One decoder of a bundle: its folder below the bundle's ("" or `judged`), and its training examples."""

    name: str
    tokenized: Path


@dataclass(frozen=True, slots=True)
class Parent:
    """A verified bundle and its decoders' training options and data."""

    bundle: Bundle
    tokenized: Path
    options: TrainOptions

    @property
    def repeats(self) -> bool:
        """Whether seen items compete in the measurement."""
        return learned_repeats(self.bundle.manifest)

    @property
    def depth(self) -> int:
        return self.bundle.catalogue().depth

    @property
    def members(self) -> tuple[Member, ...]:
        """Its decoders, the judged one first."""
        if self.bundle.judged_dir == self.bundle.path:
            return (Member("", self.tokenized),)
        return Member(JUDGED, self.tokenized), Member("", self.tokenized / REFIT)


def open_parent(bundle: Bundle, stages_dir: Path) -> Parent:
    """Verify a bundle and find its training data and options.

    Raises ConfigError if its training is unknown, its data was removed or it has items outside of the data;
    BundleCorrupt.
    """
    bundle.verify()
    if bundle.is_imported:
        raise ConfigError(
            f"VERSION: the decoder of {bundle.version} was trained elsewhere, so no recipe can train it further; "
            "optimise a version that `tailrace pipeline` trained"
        )
    lineage: Mapping[str, Any] = bundle.manifest.get("lineage", {})
    key, options = lineage.get("stages", {}).get("tokenize"), _options_of(lineage.get("options", {}))
    if key is None or options is None:
        raise ConfigError(
            f"VERSION: the manifest of {bundle.version} names no training; give a version that `tailrace pipeline` "
            "published"
        )
    tokenized = stages_dir / "tokenize" / key
    if not tokenized.is_dir():
        raise ConfigError(
            f"VERSION: the training data of {bundle.version} are no longer in {tokenized}; run `tailrace pipeline` "
            "with its options again"
        )
    if load_item_ids(tokenized / "catalogue.parquet") != bundle.item_ids():
        before = lineage.get("items_added_to", "the version before its items were added")
        raise ConfigError(
            f"VERSION: {bundle.version} has items that its training data lack; optimise {before}, then add the items "
            "to the result"
        )
    return Parent(bundle, tokenized, options)


def _options_of(given: Mapping[str, Any]) -> TrainOptions | None:
    """Return a decoder's training options from its bundle's lineage; None if they are not recorded."""
    try:
        trained = given["recipe"]["train"]
        fit = FitOptions(**{**trained["fit"], "descent": DescentOptions(**trained["fit"]["descent"])})
        return TrainOptions(**{**trained, "fit": fit})
    except (LookupError, TypeError, AttributeError):
        return None
