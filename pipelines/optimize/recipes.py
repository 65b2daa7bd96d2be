"""Recipes: how a decoder's weights change, and how the engine stores them. A new recipe is a row of `RECIPES`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from models.catalogue import load_catalogue
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from pipelines.data.examples import Split, read_cases, sample_cases
from pipelines.optimize.fine_tune import Tuning, fine_tune
from pipelines.optimize.parent import Member, Parent
from pipelines.optimize.pruning import without_channels, without_heads
from pipelines.optimize.rounding import engine_numbers
from pipelines.runner.stage import Progress
from pipelines.training.fit.checkpoints import Checkpoints
from services.errors import ConfigError
from services.llm.engine.config import WeightKind

_QAT, _HEALING = Tuning(epochs=1), Tuning(epochs=2, rate=0.3)
_KEPT_CHANNELS, _KEPT_HEADS = 0.75, 0.75
_NUM_CALIBRATED = 512


@dataclass(frozen=True, slots=True)
class Job:
    """A decoder of a parent as a recipe's input, and the place of its fit's checkpoints."""

    parent: Parent
    member: Member
    checkpoints: Checkpoints
    progress: Progress
    epochs: int | None = None
    """Replaces the recipe's own number; None: that number."""

    def decoder(self) -> Decoder:
        return load_decoder(self.parent.bundle.path / self.member.name / "decoder", torch.float32, "cpu")


@dataclass(frozen=True, slots=True)
class VariantRecipe:
    """A change of a decoder, and the weight kind of the result.

    `change` makes a job's decoder; None leaves its weights unchanged. `weight_kind` is how the engine stores the
    result; None: an export of the parent for another runtime, which the engine does not serve.
    """

    name: str
    what: str
    weight_kind: WeightKind | None
    change: Callable[[Job], Decoder] | None = None


def _quantisation_aware(job: Job, weight_kind: WeightKind) -> Decoder:
    decoder = job.decoder()
    _fit(job, decoder, _QAT, weight_kind)
    return decoder


def _pruned(job: Job, prune: Callable[..., Decoder], kept_share: float) -> Decoder:
    catalogue = load_catalogue(job.member.tokenized / "catalogue.parquet")
    histories = sample_cases(read_cases(job.member.tokenized, Split.VALID), _NUM_CALIBRATED).histories
    options = job.parent.options
    decoder = prune(
        job.decoder(), catalogue, [history[-options.max_items :] for history in histories], kept_share, options.stride
    )
    _fit(job, decoder, _HEALING, "model")
    return decoder


def _fit(job: Job, decoder: Decoder, tuning: Tuning, weight_kind: WeightKind) -> None:
    """Fit a changed decoder with the unchanged one as its teacher, with the arithmetic of an engine of this kind."""
    if job.epochs is not None:
        tuning = replace(tuning, epochs=job.epochs)
    within = partial(engine_numbers, weight_kind=weight_kind)
    fine_tune(decoder, job.decoder(), job.member, job.parent.options, tuning, job.checkpoints, job.progress, within)


RECIPES = (
    VariantRecipe("int8", "layers' matrices in 8 bits, after training", "int8"),
    VariantRecipe("int8-all", "embedding and head in 8 bits too, after training", "int8_all"),
    VariantRecipe("int4", "layers' matrices in 4 bits, embedding and head in 8, after training", "int4"),
    VariantRecipe(
        "int4-qat",
        "the same, after training with the engine's rounding",
        "int4",
        partial(_quantisation_aware, weight_kind="int4"),
    ),
    VariantRecipe(
        "pruned-heads",
        "a quarter of the heads pruned, distilled again, in 8 bits",
        "int8_all",
        partial(_pruned, prune=without_heads, kept_share=_KEPT_HEADS),
    ),
    VariantRecipe(
        "pruned-ffn",
        "a quarter of the feed-forward channels pruned, distilled again, in 8 bits",
        "int8_all",
        partial(_pruned, prune=without_channels, kept_share=_KEPT_CHANNELS),
    ),
    VariantRecipe("onnx-int8", "an ONNX graph in 8 bits for ONNX Runtime", None),
)


def chosen(names: str) -> tuple[VariantRecipe, ...]:
    """Return the recipes of these comma-separated names; all of them for an empty string. Raises ConfigError."""
    by_name = {recipe.name: recipe for recipe in RECIPES}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(by_name)
    for name in wanted:
        if name not in by_name:
            raise ConfigError(f"--recipes: {name!r} is not known; give some of {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys(wanted))
