"""Child bundles: a parent's files with another decoder or another weight kind, and a manifest of the change.

optimize/<key>/[judged/]decoder/   the stage's folder: the recipe's result for each of the parent's decoders
"""

import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from models.decoder.config import read_config
from models.decoder.decoder import Decoder
from models.decoder.weights import save_decoder
from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from models.registry.trainings import lineage_of_variant
from pipelines.optimize.choice import VariantRow
from pipelines.optimize.parent import Parent
from pipelines.optimize.recipes import Job, VariantRecipe
from pipelines.publication.model_card import CARD
from pipelines.runner.stage import Progress, StageCache, content_key
from pipelines.training.fit.checkpoints import Checkpoints

STAGE = "optimize"
PICTURE = "pareto.png"
_CHECKPOINT_EVERY_S = 60.0


def make_decoders(
    parent: Parent, recipe: VariantRecipe, cache: StageCache, epochs: int | None, progress: Progress
) -> Path | None:
    """Return the folder with the recipe's result for each of the parent's decoders.

    None if it leaves them unchanged.

    A killed run resumes from its fit's last checkpoint.
    """
    change = recipe.change
    if change is None:
        return None
    files = {name: digest for name, digest in parent.bundle.manifest["files"].items() if "decoder/" in name}
    parameters = {"recipe": recipe.name, "epochs": epochs, "files": files}
    key = content_key(parameters, [parent.tokenized.name], [sys.modules[VariantRecipe.__module__]])
    saved = Checkpoints(cache.checkpoint_dir(STAGE, key), STAGE, _CHECKPOINT_EVERY_S)

    def work(out: Path) -> None:
        for member in parent.members:
            job = Job(parent, member, saved.of(member.name or "serving"), progress, epochs)
            save_decoder(change(job), out / member.name / "decoder")

    return cache.run(STAGE, key, work).path


def judged_bundle(
    parent: Parent, name: str, weight_kind: str, made: Path | None, scratch: BundleStore, folder: Path
) -> Bundle:
    """Return a bundle of the measured decoder: the parent's, or the recipe's result.

    It is served only from the scratch store.
    """
    source, member = parent.bundle.judged_dir, parent.members[0]
    changed = source if made is None else made / member.name
    shutil.copytree(changed / "decoder", folder / "decoder")
    shutil.copyfile(source / "catalogue.parquet", folder / "catalogue.parquet")
    return scratch.publish(
        folder, name, {"prompt": parent.bundle.manifest["prompt"], "serving": {"weight_kind": weight_kind}}
    )


@dataclass(frozen=True, slots=True)
class Winner:
    """A winning recipe, its row, and the folder of the decoders that it made; None if it left them unchanged."""

    recipe: VariantRecipe
    row: VariantRow
    made: Path | None


def write_child(parent: Parent, winner: Winner, page: str, picture: Path, folder: Path) -> dict[str, Any]:
    """Write the parent's files with the winner's decoders into a folder, and return the child's manifest."""
    shutil.copytree(parent.bundle.path, folder, ignore=shutil.ignore_patterns("manifest.json"))
    if (made := winner.made) is not None:
        for member in parent.members:
            target = folder / member.name / "decoder"
            shutil.rmtree(target)
            shutil.copytree(made / member.name / "decoder", target)
    card = folder / CARD
    after = f"What follows is on {parent.bundle.version}.\n\n{card.read_text()}" if card.exists() else ""
    card.write_text(f"{page}\n\n{after}")
    shutil.copyfile(picture, folder / PICTURE)
    return _manifest(parent, winner.recipe, winner.row, read_num_parameters(folder / "decoder"))


def read_num_parameters(decoder_dir: Path) -> int:
    """Count the parameters of a checkpoint's shape."""
    with torch.device("meta"):
        decoder = Decoder(read_config(decoder_dir))
    return sum(parameter.numel() for parameter in decoder.parameters())


def _manifest(parent: Parent, recipe: VariantRecipe, row: VariantRow, num_parameters: int) -> dict[str, Any]:
    about = {name: value for name, value in parent.bundle.manifest.items() if name not in {"version", "files"}}
    return about | {
        "serving": {"weight_kind": recipe.weight_kind},
        "num_parameters": num_parameters,
        "optimisation": asdict(row) | {"recipe": recipe.name, "what": recipe.what},
        "lineage": lineage_of_variant(parent.bundle.manifest, parent.bundle.version),
    }
