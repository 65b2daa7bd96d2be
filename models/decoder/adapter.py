"""Low-rank adapters of a decoder (LoRA, Hu et al. 2021) in PEFT's folder layout.

    adapter_config.json         r, lora_alpha, target_modules, use_rslora, ...
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight (r, in) and lora_B.weight (out, r)

An adapter changes projections W of `layer.py` to W + scale * B A. Everything else that PEFT can store is refused by
name. A decoder's folder may hold an adapter in `adapter/`: `load_decoder` returns the sum of both.

Shape suffixes: R rank, N and I out and in of a projection.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.layer import Projection, checkpoint_names, rows_of
from models.errors import CheckpointError

ADAPTER = "adapter"
"""Folder of an adapter within its decoder's folder."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_MERGE = "merge it into its base (peft: merge_and_unload) and import the sum"
_SUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "peft_type": (("LORA",), _MERGE),
    "use_dora": ((False, None), _MERGE),
    "bias": (("none", None), "train it with bias='none'"),
    "lora_bias": ((False, None), "train it with lora_bias=False"),
    "modules_to_save": ((None, []), "train it without modules_to_save"),
    "fan_in_fan_out": ((False, None), "give the adapter of a decoder of linear layers"),
    "layer_replication": ((None,), "train it without layer_replication"),
    "trainable_token_indices": ((None,), "train it without trainable_token_indices"),
    "target_parameters": ((None, []), "train it on target_modules"),
    "alora_invocation_tokens": ((None,), "train it without invocation tokens"),
    "use_qalora": ((False, None), _MERGE),
    "init_lora_weights": (
        (True, False, None, "gaussian", "eva", "orthogonal"),
        "it changed the base too; save it with path_initial_model_for_weight_conversion",
    ),
}
"""Keys of adapter_config.json that change the sum, with the supported values, and the fix for another value."""


class LowRank(NamedTuple):
    """The two matrices of a projection's change, `scale` * B A."""

    a_RI: Tensor
    b_NR: Tensor
    scale: float

    @property
    def delta_NI(self) -> Tensor:
        """The change of the weight, in fp32."""
        return self.scale * (self.b_NR.float() @ self.a_RI.float())


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """An adapter's matrices by the decoder's name of their projection, such as `layers.0.q`."""

    pairs: Mapping[str, LowRank]
    base: str = ""
    """The base's name or folder, as its training recorded it."""

    @cached_property
    def rank(self) -> int:
        """The largest rank of a projection."""
        return max(len(pair.a_RI) for pair in self.pairs.values())


def projections_of(config: DecoderConfig) -> list[Projection]:
    """Return the projections of a layer that an adapter may change."""
    return [row for row in rows_of(config) if isinstance(row, Projection)]


def split_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Split the tensors of an adapter's file into A and B by the checkpoint's module, and others by their name there.

    The matrices of an embedding have the keys `embedding_A` and `embedding_B`.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        target = name.removeprefix(_PREFIX).replace(".base_layer", "").replace(".modules_to_save.default", "")
        match = _TENSOR.fullmatch(target)
        if match is None:
            others[target] = tensor
        else:
            pairs.setdefault(match[1], {})[f"{match[2] or ''}{match[3]}"] = tensor
    return pairs, others


def scale_of(about: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of B A for a module of the checkpoint: alpha / r, or alpha / sqrt(r) with rsLoRA."""
    alpha = float(_for_module(about, "alpha_pattern", module, about.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if about.get("use_rslora") else rank)


def read_adapter(folder: Path, config: DecoderConfig) -> Adapter:
    """Read an adapter of a decoder with this config. Raises CheckpointError naming the field and the fix."""
    about = read_adapter_config(folder / ADAPTER_CONFIG)
    pairs, others = split_tensors(_read_tensors(folder / ADAPTER_WEIGHTS))
    if others:
        _refuse(folder / ADAPTER_WEIGHTS, next(iter(others)), "is not a low-rank matrix", "save only the adapter")
    projections = {row.checkpoint: row for row in projections_of(config)}
    names = {checkpoint: name for name, checkpoint in checkpoint_names(config).items() if name.startswith("layers.")}
    by_name = {}
    for module, pair in pairs.items():
        row = projections.get(module.split(".", 3)[-1]) if module in names else None
        by_name[names.get(module, "")] = _checked(folder / ADAPTER_WEIGHTS, about, module, pair, row, config)
    if not by_name:
        _refuse(folder / ADAPTER_WEIGHTS, "lora_A", "no matrices", "save the adapter after its training")
    return Adapter(pairs=by_name, base=str(about.get("base_model_name_or_path") or ""))


def save_adapter(adapter: Adapter, config: DecoderConfig, folder: Path) -> None:
    """Write an adapter in PEFT's layout. Ranks and factors that differ are written as patterns."""
    modules = checkpoint_names(config)
    pairs = {modules[name]: pair for name, pair in adapter.pairs.items()}
    about: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": max(_alpha(pair) for pair in pairs.values()),
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in pairs}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    about["rank_pattern"] = {
        re.escape(module): len(pair.a_RI) for module, pair in pairs.items() if len(pair.a_RI) != about["r"]
    }
    about["alpha_pattern"] = {
        re.escape(module): _alpha(pair) for module, pair in pairs.items() if _alpha(pair) != about["lora_alpha"]
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(about, indent=1, sort_keys=True))
    tensors = {f"{_PREFIX}{module}.lora_A.weight": pair.a_RI for module, pair in pairs.items()}
    tensors |= {f"{_PREFIX}{module}.lora_B.weight": pair.b_NR for module, pair in pairs.items()}
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def merge_adapter(decoder: Decoder, adapter: Adapter) -> None:
    """Add an adapter to a decoder's weights in place, computed in fp32."""
    for name, pair in adapter.pairs.items():
        weight_NI = decoder.get_submodule(name).weight
        assert isinstance(weight_NI, Tensor), f"{name} is a projection"
        weight_NI.copy_(weight_NI.float() + pair.delta_NI.to(weight_NI.device))


def read_adapter_config(path: Path, allowed: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Read adapter_config.json; keys in `allowed` may have any value.

    Raises CheckpointError naming the key whose value is not supported.
    """
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable ({error}); give the folder that save_pretrained wrote") from error
    if not isinstance(about, dict):
        raise CheckpointError(f"{path}: not an object; give the folder that save_pretrained wrote")
    for key, (supported, fix) in _SUPPORTED.items():
        if key not in allowed and about.get(key, supported[0]) not in supported:
            _refuse(path, key, f"{about[key]!r:.80} is not supported", fix)
    for key, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        by_pattern = about.get(patterns) or {}
        if not isinstance(by_pattern, dict) or not all(map(_is_pattern, by_pattern)):
            _refuse(
                path, patterns, f"{by_pattern!r:.80} is not an object of patterns", "give the value of the training"
            )
        for field, value in ((key, about.get(key, 8)), *((patterns, value) for value in by_pattern.values())):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                _refuse(path, field, f"{value!r:.80} is not a positive number", "give the value of the training")
    return about


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise CheckpointError(f"{path}: missing, and pickle is not read; save the adapter with safe_serialization=True")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({error}); save the adapter again") from error


def _checked(
    path: Path,
    about: Mapping[str, Any],
    module: str,
    pair: Mapping[str, Tensor],
    row: Projection | None,
    config: DecoderConfig,
) -> LowRank:
    """Return a module's matrices after checking their shapes and numbers. Raises CheckpointError."""
    if row is None:
        known = ", ".join(projection.checkpoint.rsplit(".", 1)[-1] for projection in projections_of(config))
        _refuse(path, module, "not a projection of this decoder", f"give the decoder's own adapter, of {known}")
    if pair.keys() != {"A", "B"}:
        _refuse(path, module, f"only {', '.join(sorted(pair))} is stored", "save the adapter again")
    a_RI, b_NR = pair["A"], pair["B"]
    rank = _for_module(about, "rank_pattern", module, about.get("r", 8))
    wanted = ((rank, row.columns(config)), (row.rows(config), rank))
    if (tuple(a_RI.shape), tuple(b_NR.shape)) != wanted:
        shapes = f"A {tuple(a_RI.shape)} and B {tuple(b_NR.shape)}, not {wanted[0]} and {wanted[1]}"
        _refuse(path, module, shapes, "give the adapter of this decoder, with the r of its training")
    if not all(matrix.is_floating_point() and bool(matrix.float().isfinite().all()) for matrix in (a_RI, b_NR)):
        _refuse(path, module, "not finite real numbers", "train it again")
    return LowRank(a_RI, b_NR, scale_of(about, module, int(rank)))


def _for_module(about: Mapping[str, Any], patterns: str, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT does."""
    by_pattern: Mapping[str, Any] = about.get(patterns) or {}
    return next(
        (value for pattern, value in by_pattern.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)), default
    )


def _alpha(pair: LowRank) -> float:
    alpha = round(pair.scale * len(pair.a_RI), 9)
    return int(alpha) if alpha.is_integer() else alpha


def _refuse(path: Path, field: str, problem: str, fix: str) -> NoReturn:
    raise CheckpointError(f"{path}: {field}: {problem}; {fix}")
