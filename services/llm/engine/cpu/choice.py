"""Chooses the forward pass of a CPU: the compiled one where it can be built and knows the case, plain torch else.

Never an error: what stands in the way is told in one line of log, and the engine is slower.
"""

import logging
from pathlib import Path

import torch

from services.llm.engine.config import EngineConfig
from services.llm.engine.cpu.compiler import BuildFailedError, built_library
from services.llm.engine.cpu.forward import CpuForward
from services.llm.engine.cpu.library import Library
from services.llm.engine.forward.attention import TorchAttention
from services.llm.engine.forward.layers import Forward, LayerLoop
from services.llm.engine.forward.ops import TorchKernels
from services.llm.engine.forward.weights import Weights
from services.llm.engine.kv.cache import KvCache

_log = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16)


def cpu_forward(weights: Weights, cache: KvCache, config: EngineConfig) -> Forward:
    """Build the fastest forward pass that this machine has."""
    why_not = _unsuited(weights, config)
    if why_not is None:
        try:
            return CpuForward(_library(config.kernel_cache), weights, cache, config.weight_kind)
        except (BuildFailedError, OSError) as error:
            why_not = str(error)
    if config.cpu_kernels == "compiled":
        _log.warning("the engine runs on plain torch, several times slower: %s", why_not)
    attention = TorchAttention(
        config.tile_queries, config.tile_tokens, config.block_tokens, weights.head_VD.device, weights.config.window
    )
    return LayerLoop(weights, cache, TorchKernels(), attention)


def _library(cache: Path) -> Library:
    """Load the library. One in the cache that does not load any more is built anew, or every start would run on torch."""
    path = built_library(cache)
    try:
        return Library(path)
    except OSError:
        if path.parent != cache:
            raise
        path.unlink(missing_ok=True)
        return Library(built_library(cache))


def _unsuited(weights: Weights, config: EngineConfig) -> str | None:
    if config.cpu_kernels == "torch":
        return "so configured"
    if weights.head_VD.dtype not in _DTYPES:
        return f"weights in {weights.head_VD.dtype}"
    return None if config.kv_kind == "model" else f"keys and values in {config.kv_kind}"
