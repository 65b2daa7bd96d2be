"""A decoder's checkpoint folder in Hugging Face layout: `config.json` and safetensors, in one file or in shards.

Never pickle. Tensors that are missing, unknown or misshapen are named. It knows nothing of codes, bundles or serving; the
config is `config_json`'s.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.decoder.config import describe_config, read_config
from models.decoder.decoder import Decoder
from services.errors import CheckpointError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors that old checkpoints store although they follow from the config."""
_SHOWN = 5


def load_decoder(folder: Path, dtype: torch.dtype, device: str | torch.device) -> Decoder:
    """Load a decoder, ready for inference. Raises CheckpointError naming what is missing, unknown, misshapen or unsupported."""
    config = read_config(folder)
    tensors = _read_tensors(folder)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with torch.device("meta"):
        decoder = Decoder(config)
    _check_tensors(folder, decoder.state_dict(), tensors)
    decoder.load_state_dict(tensors, assign=True)
    return decoder.to(device=device, dtype=dtype).eval()


def save_decoder(decoder: Decoder, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` into the folder, which is made if absent. transformers reads them too."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in decoder.state_dict().items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(describe_config(decoder.config), indent=1, sort_keys=True))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in _shards(folder):
        try:
            tensors.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: not readable as safetensors ({error})") from error
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_DERIVED_SUFFIXES)}


def _shards(folder: Path) -> list[Path]:
    """Return the files to read: the one that has everything goes before an index, as in transformers."""
    whole, index = folder / _WEIGHTS, folder / _INDEX
    if whole.exists() or not index.exists():
        return [whole]
    try:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return [folder / name for name in sorted(set(names.values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error})") from error


def _check_tensors(folder: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    misshapen = [
        f"{name} is {tuple(found[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    complaints = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unknown": sorted(found.keys() - wanted.keys()),
        "misshapen": misshapen,
        "not of real numbers": sorted(
            name for name in wanted.keys() & found.keys() if not found[name].is_floating_point()
        ),
    }
    said = [f"{what}: {_shorten(names)}" for what, names in complaints.items() if names]
    if said:
        raise CheckpointError(f"{folder}: {'; '.join(said)}")


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
