"""The options of `tailrace plan model`: the model, GPUs, training and load; `mesh.Execution` has the layout's."""

import math
from dataclasses import dataclass
from typing import Annotated, get_args

from pipelines.declaration import Option, check_bounds
from services.llm.engine.config import KvKind

_MOST = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model to plan, its GPUs, and its training."""

    gpus: Annotated[str, Option("Number and kind of GPUs, such as 8xh100.")] = "1xh100"
    train: Annotated[bool, Option("Plan training only.", names=("--train",))] = False
    serve: Annotated[bool, Option("Plan serving only.", names=("--serve",))] = False
    batch: Annotated[
        int | None,
        Option(
            "Rows of a training step; with --serve, contexts in memory.", at_least=1, at_most=_MOST, shown="8 per GPU"
        ),
    ] = None
    length: Annotated[int, Option("Tokens per row.", at_least=1, at_most=_MOST)] = 2_048
    layout: Annotated[
        str | None, Option("Plan only this layout: tp8,pp2,dp4; also fsdp8, mb2, none, selective, full.")
    ] = None
    dtype: Annotated[str, Option("Matrix products in training: bf16, fp8 or fp32.")] = "bf16"
    parameters: Annotated[float | None, Option("Parameters of a model other than a decoder.")] = None
    flops: Annotated[float | None, Option("With --parameters: FLOPs of one sample's forward pass.")] = None
    activation_mb: Annotated[
        float | None, Option("With --parameters: MB that each sample keeps for the backward pass.")
    ] = None
    price_per_gpu_hour: Annotated[
        float | None, Option("Price of one GPU for an hour.", at_least=0, below=math.inf, fix="give 0 or more")
    ] = None

    def __post_init__(self) -> None:
        """Validate the numbers. Raises ConfigError naming the option."""
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """The load to serve. `beams` above 1 ranks items by beam search."""

    rate: Annotated[float, Option("Requests per second.", above=0, below=math.inf, fix="give more than 0")] = 1.0
    prompt: Annotated[int, Option("Tokens of a request's prompt.", at_least=1, at_most=_MOST)] = 1_024
    output: Annotated[int, Option("Tokens of its answer.", at_least=1, at_most=_MOST)] = 128
    beams: Annotated[int, Option("Beams of a request that ranks items.", at_least=1, at_most=_MOST)] = 1
    kv_kind: Annotated[
        KvKind,
        Option("Numbers of the KV cache: model, int8 or fp8.", names=("--kv",), choices=get_args(KvKind)),
    ] = "model"

    def __post_init__(self) -> None:
        """Validate the values. Raises ConfigError naming the option."""
        check_bounds(self)
