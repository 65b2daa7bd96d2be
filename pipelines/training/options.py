"""The options of training: declared here only. Imports no torch, so that `--help` is fast."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pipelines.declaration import Option, check_bounds
from services.errors import ConfigError


class DeviceChoice(StrEnum):
    """`auto` selects the GPU if there is one. On a GPU, matrix products run in bf16 with fp32 weights."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Recompute(StrEnum):
    """Activations of a block that are recomputed."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Compression(StrEnum):
    """How DDP sends gradients: fp32, two bytes per number, or rank-1 factors with error feedback.

    PowerSGD: Vogels et al. 2019.
    """

    NONE = "none"
    BF16 = "bf16"
    FP16 = "fp16"
    POWER_SGD = "powersgd"


BUCKET_MB = 25.0
"""torch's default size of DDP's gradient buckets, in MiB."""
DEVICE_HELP = "Device of training and evaluation: auto, cpu or cuda."


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamOptions:
    """The processes that fit a model, and how they divide the work (`workers.team.Team`)."""

    workers: Annotated[
        int, Option("Processes that fit each model: one per GPU, or per core.", at_least=1, fix="give 1 or more")
    ] = 1
    parallel: Annotated[
        str,
        Option(
            "Layout of the decoder over the workers: auto, ddp, fsdp, hsdpK, tpK, ppK, ddp+tpK, fsdp+tpK or ppK+ddp."
        ),
    ] = "auto"
    precision: Annotated[
        str,
        Option(
            "Matrix products in training: fp32, bf16, or auto (bf16 on a GPU). Weights and sums stay fp32.",
            choices=("auto", "fp32", "bf16"),
        ),
    ] = "auto"
    recompute: Annotated[
        str,
        Option(
            "Activations of each layer recomputed in the backward pass: none, selective or full.",
            choices=tuple(Recompute),
        ),
    ] = Recompute.NONE
    bucket_mb: Annotated[
        float,
        Option("MiB of gradients per DDP bucket, averaged during the backward pass.", above=0),
    ] = BUCKET_MB
    compression: Annotated[
        str,
        Option(
            "Encoding of the gradients that DDP averages: none (fp32), bf16, fp16 or powersgd. "
            "Checkpoints omit PowerSGD's error feedback.",
            choices=tuple(Compression),
        ),
    ] = Compression.NONE
    ray: Annotated[
        str,
        Option(
            "Run the workers with Ray Train in this cluster, which must not be the stack's; `auto` in a RayJob, "
            "`local` for a cluster that ends with the fit."
        ),
    ] = ""
    timeout_s: Annotated[
        float,
        Option(
            "Seconds without an answer before a worker is terminated and all resume from the last checkpoint.",
            names=("--worker-timeout-s",),
            above=0,
            fix="give more seconds than one step takes",
        ),
    ] = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """A low-rank adapter to train instead of a decoder."""

    adapter_of: Annotated[
        str,
        Option(
            "Train a low-rank adapter on this version's frozen decoder, and publish it as a bundle that shares its "
            "files."
        ),
    ] = ""
    adapter_rank: Annotated[int, Option("Rank of the adapter.", at_least=1, at_most=256)] = 8
    adapter_alpha: Annotated[float, Option("Factor of the adapter times its rank, as in PEFT.", above=0)] = 16.0

    def __post_init__(self) -> None:
        """Validate the numbers. Raises ConfigError naming the option."""
        check_bounds(self)

    def check_training(self, *, others: Mapping[str, bool]) -> None:
        """Reject options that an adapter's training does not take. Raises ConfigError naming the option."""
        for option, is_given in others.items():
            if self.adapter_of and is_given:
                raise ConfigError(f"{option}: not with --adapter-of, which keeps its decoder and codes; remove one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """Where a fit is reported, in addition to its stage's files. `run` names the fit: stage, key and part."""

    run: str = ""
    tensorboard_dir: Annotated[
        Path | None,
        Option("Write each fit's losses by step for TensorBoard, below this folder.", names=("--tensorboard",)),
    ] = None
    mlflow_uri: Annotated[
        str,
        Option(
            "Report each fit to the MLflow tracking server at this address.",
            names=("--mlflow",),
            envvar="MLFLOW_TRACKING_URI",
        ),
    ] = ""
    memory_snapshot_dir: Annotated[
        Path | None,
        Option("Record the GPU's allocations in each fit, one file per rank.", names=("--memory-snapshot",)),
    ] = None

    def of(self, part: str) -> "Reporting":
        return replace(self, run=f"{self.run}/{part}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderRecipeOptions:
    """The file of training recipes, and changes to the decoder of each recipe."""

    recipes: Annotated[
        Path | None, Option("Training recipes by size of data, as TOML.", shown="pipelines/training/recipes.toml")
    ] = None
    epochs: Annotated[int | None, Option("Epochs of the decoder.", at_least=1, shown="the recipe's, usually 25")] = None
    seed: Annotated[int, Option("Random seed of training.", at_least=0, below=2**32)] = 0

    def __post_init__(self) -> None:
        """Validate the numbers. Raises ConfigError naming the option."""
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions(DecoderRecipeOptions):
    """The file of training recipes, and changes to each of its recipes."""

    student_epochs: Annotated[
        int | None, Option("Epochs of the student.", at_least=1, shown="the recipe's, usually 15")
    ] = None
