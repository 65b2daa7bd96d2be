"""Reads and writes a decoder's checkpoint folder in Hugging Face layout: `config.json` and safetensors.

An adapter in the folder's `adapter/` (adapter.py) is added to the weights.

Pickle is never read. Errors name missing, unknown or misshapen tensors. The module does not know codes, bundles or
serving.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models.decoder.adapter import ADAPTER, merge_adapter, read_adapter
from models.decoder.config import DecoderConfig, describe_config, read_config
from models.decoder.decoder import Decoder
from models.decoder.layer import OUTSIDE_LAYERS, checkpoint_names
from models.errors import CheckpointError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PART = "model-{:05}-of-{:05}.safetensors"
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors that old checkpoints store although the config determines them."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHOWN = 5
_CHECKED_AT_ONCE = 2**24


def load_decoder(folder: Path, dtype: torch.dtype, device: str | torch.device, *, with_adapter: bool = True) -> Decoder:
    """Load a decoder, ready for inference, with its folder's adapter, if any and not excluded.

    Raises CheckpointError naming the missing, unknown, misshapen or unsupported part.
    """
    config, tensors = _untied(read_config(folder), _read_tensors(folder))
    with torch.device("meta"), _Uninitialized():
        decoder = Decoder(config)
    names = _tensor_names(config, decoder.state_dict())
    _check_tensors(folder, {names[name]: tensor for name, tensor in decoder.state_dict().items()}, tensors)
    decoder.load_state_dict({name: tensors[stored] for name, stored in names.items()}, assign=True)
    decoder = decoder.to(device=device, dtype=dtype).eval()
    if with_adapter and (folder / ADAPTER).is_dir():
        merge_adapter(decoder, read_adapter(folder / ADAPTER, config))
    return decoder


class _Uninitialized(TorchFunctionMode):
    """Modules made within it draw no weights, for which torch imports its compiler on `meta`: a second of a start."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


def save_decoder(decoder: Decoder, folder: Path) -> None:
    """Write `config.json` and `model.safetensors` into the folder, which is created if absent.

    Readable by transformers. An adapter in the folder is removed: `load_decoder` has added it to the weights.
    """
    shutil.rmtree(folder / ADAPTER, ignore_errors=True)
    _save_tensors(decoder.config, decoder.state_dict(), folder, _WEIGHTS)
    _save_config(decoder.config, folder)


def save_part(config: DecoderConfig, tensors: Mapping[str, Tensor], folder: Path, number: int, num_parts: int) -> None:
    """Write shard `number` (from 1): tensors by their names in the decoder. Call `save_index` after the last shard."""
    _save_tensors(config, tensors, folder, _PART.format(number, num_parts))


def save_index(config: DecoderConfig, folder: Path, num_parts: int) -> None:
    """Write `config.json` and the index of the shards that `save_part` wrote. Readable by transformers."""
    weight_map, total_bytes = {}, 0
    for number in range(1, num_parts + 1):
        name = _PART.format(number, num_parts)
        for tensor, (start, end) in _stored_at(folder / name).items():
            weight_map[tensor] = name
            total_bytes += end - start
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=1))
    _save_config(config, folder)


def _save_tensors(config: DecoderConfig, tensors: Mapping[str, Tensor], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = _tensor_names(config, tensors)
    stored = {names[name]: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / name, metadata={"format": "pt"})


def _stored_at(path: Path) -> dict[str, tuple[int, int]]:
    """Return the tensor offsets of a safetensors file: its header, whose length is in the first eight bytes."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(about["data_offsets"]) for name, about in header.items() if name != "__metadata__"}


def _save_config(config: DecoderConfig, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(describe_config(config), indent=1, sort_keys=True))


def _tensor_names(config: DecoderConfig, names: Iterable[str]) -> dict[str, str]:
    modules = checkpoint_names(config)
    split = {name: name.rsplit(".", 1) for name in names}
    return {name: f"{modules[module]}.{kind}" for name, (module, kind) in split.items()}


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        tensors.update(read_tensors(path))
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_DERIVED_SUFFIXES)}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises CheckpointError."""
    with _reading(path):
        return load_file(path)


def check_tensors(path: Path) -> None:
    """Check that a safetensors file is whole, by its header. Raises CheckpointError."""
    with _reading(path), safe_open(path, "pt"):
        pass


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({error}); copy the file again") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files to read. As in transformers, a single file takes precedence over an index of shards.

    Raises CheckpointError naming the conversion if the weights exist only in another form.
    """
    whole, index = folder / _WEIGHTS, folder / _INDEX
    if not (whole.exists() or index.exists()):
        _refuse_other_forms(folder)
    if whole.exists() or not index.exists():
        return [whole]
    try:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = [folder / name for name in sorted(set(names.values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error})") from error
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        lacks = f"{len(missing)} of {len(files)} shards missing, such as {missing[0]}"
        raise CheckpointError(f"{index}: {lacks}; copy or download them too")
    return files


def _refuse_other_forms(folder: Path) -> None:
    """Reject a folder without safetensors, naming the conversion if its weights have another form.

    Raises CheckpointError.
    """
    if broken := [name for name in (_WEIGHTS, _INDEX) if (folder / name).is_symlink()]:
        raise CheckpointError(f"{folder / broken[0]}: a link to a file that does not exist; download the folder again")
    pickled = next((path.name for suffix in _PICKLED for path in sorted(folder.glob(suffix))), None)
    if pickled is not None:
        raise CheckpointError(
            f"{folder}: weights as {pickled} only, a pickle, which can run any code and is never read; convert the "
            "folder, "
            f'if you trust it, with python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    if (gguf := next(iter(sorted(folder.glob("*.gguf"))), None)) is not None:
        raise CheckpointError(f"{folder}: a GGUF file and no {_WEIGHTS}; give the file, {gguf}")
    raise CheckpointError(f"{folder}: neither {_WEIGHTS} nor {_INDEX}; give the folder of a whole checkpoint")


def _untied(config: DecoderConfig, tensors: dict[str, Tensor]) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Return an untied config if the stored head differs from the embedding: the stored head was trained.

    A tied decoder's file may hold the shared matrix under the head's name only: `safetensors.torch.save_model` does.
    """
    head_name, name = (f"{OUTSIDE_LAYERS[module][0]}.weight" for module in ("head", "embedding"))
    head, embedding = tensors.get(head_name), tensors.get(name)
    if not config.tie_word_embeddings or head is None:
        return config, tensors
    if embedding is not None and not torch.equal(head, embedding):
        return replace(config, tie_word_embeddings=False), tensors
    return config, {**{other: tensor for other, tensor in tensors.items() if other != head_name}, name: head}


def _check_tensors(folder: Path, wanted: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    misshapen = [
        f"{name} is {tuple(stored[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    problems = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unknown": sorted(stored.keys() - wanted.keys()),
        "misshapen": misshapen,
        "not of real numbers": sorted(
            name for name in wanted.keys() & stored.keys() if not stored[name].is_floating_point()
        ),
        "with numbers that are not finite": sorted(
            name for name in wanted.keys() & stored.keys() if not _is_finite(stored[name])
        ),
    }
    described = [f"{what}: {_shorten(names)}" for what, names in problems.items() if names]
    if described:
        raise CheckpointError(f"{folder}: {'; '.join(described)}; give all weights of this config.json, and no others")


def _is_finite(tensor: Tensor) -> bool:
    """Whether every number is finite; checked in parts to limit memory."""
    rows = tensor.detach().flatten()
    if not tensor.is_floating_point():
        return True
    return all(bool(part.float().isfinite().all()) for part in torch.split(rows, _CHECKED_AT_ONCE))


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
