"""Copies a checkpoint that was trained elsewhere into a folder that the engine loads, with a LoRA adapter folded in.

Pickle is never read. Deltas, other families and extra heads are refused by name, with the conversion to run.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import Tensor

from models.decoder.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LowRank,
    read_adapter_config,
    scale_of,
    split_tensors,
)
from models.decoder.config import FAMILIES, DecoderConfig, read_config
from models.decoder.layer import checkpoint_names
from models.decoder.weights import read_tensors, weight_files
from models.errors import CheckpointError
from models.files import file_sha256
from pipelines.foreign.refused import Refused
from pipelines.foreign.rows import json_object
from pipelines.foreign.tokens import read_tokenizer
from services.contracts.text import SPECIAL_TOKENS
from services.llm.text.chat_template import read_tokenizer_config

_KEPT = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_WHOLE = ("model.safetensors", "model.safetensors.index.json")
"""Files of whole weights; a training that merged its adapter keeps adapter_config.json next to them."""
_ENCODER_DECODERS = ("t5", "mt5", "umt5", "bart", "switch_transformers")
_FOLDED = frozenset({"bias", "modules_to_save", "fan_in_fan_out"})
"""Keys of adapter_config.json that apply when an adapter is added to the weights, but not when it runs separately."""
_UNUSED = {
    "do_sample": (None, False),
    "temperature": (None, 1, 1.0),
    "top_k": (None, 0, 50),
    "top_p": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "length_penalty": (None, 0, 0.0, 1, 1.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
}
"""Keys of generation_config.json that change lists, with their neutral values."""


def copy_checkpoint(folder: Path, base: Path | None, out: Path) -> DecoderConfig:
    """Copy the checkpoint to `out`: the next training may overwrite the source. Raises Refused or CheckpointError."""
    out.mkdir(parents=True)
    if not folder.is_dir():
        raise Refused(str(folder), "", "no such folder", "give a checkpoint folder in Hugging Face layout")
    is_adapter = (folder / ADAPTER_CONFIG).exists() and not any((folder / name).exists() for name in _WHOLE)
    source = _base_of(folder, base) if is_adapter else folder
    config = _check(source)
    for name in _KEPT:
        if (source_path := _found(name, folder, source)) is not None:
            shutil.copyfile(source_path, out / name)
    _complete_tokenizer(_found("added_tokens.json", folder, source), out)
    _name_special_tokens(_found("special_tokens_map.json", folder, source), out)
    if is_adapter:
        _fold(folder, source, out)
        config = read_config(out)
    else:
        index = source / _WHOLE[1]
        for path in (*weight_files(source), *((index,) if index.exists() else ())):
            if not path.is_relative_to(source) or ".." in path.relative_to(source).parts:
                raise Refused(index.name, "weight_map", f"{path} is outside the folder", "move the shards into it")
            target = out / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    _refuse_heads(out, config)
    return config


def _found(name: str, *folders: Path) -> Path | None:
    """Return this file of the first folder that has it."""
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _complete_tokenizer(added: Path | None, out: Path) -> None:
    """Write into tokenizer.json the tokens that only its neighbouring files name, as transformers adds them.

    Raises Refused for a token whose id would be another than the training's.
    """
    path = out / "tokenizer.json"
    if not path.exists():
        return
    tokenizer, about = read_tokenizer(out), read_tokenizer_config(out).get("added_tokens_decoder")
    file = "tokenizer_config.json" if about or added is None else added.name
    try:
        if about or added is None:
            named = [(int(number), AddedToken(**token)) for number, token in (about or {}).items()]
        else:
            sent = json_object(added, "save the tokenizer again")
            named = [(int(number), AddedToken(text, normalized=False)) for text, number in sent.items()]
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(file, "", f"not tokens by id ({error})", "save the tokenizer again") from error
    missing = [
        (number, token)
        for number, token in sorted(named, key=lambda pair: pair[0])
        if tokenizer.token_to_id(token.content) is None
    ]
    for number, token in missing:
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            problem = f"id {number}, and tokenizer.json has {tokenizer.token_to_id(token.content)} tokens before it"
            fix = "save the tokenizer again: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            raise Refused(file, f"token {token.content}", problem, fix)
    if missing:
        tokenizer.save(str(path))


def _name_special_tokens(named: Path | None, out: Path) -> None:
    """Write into tokenizer_config.json the special tokens that only the older special_tokens_map.json names."""
    if named is None:
        return
    about, sent = read_tokenizer_config(out), json_object(named, "save the tokenizer again")
    missing = {role: sent[role] for role in SPECIAL_TOKENS if sent.get(role) and not about.get(role)}
    if missing:
        (out / "tokenizer_config.json").write_text(json.dumps(about | missing, indent=1))


def unused_settings(folder: Path) -> list[str]:
    """Return the settings of generation_config.json that ranking does not use, as `name value`."""
    path = folder / "generation_config.json"
    settings = json_object(path, "save it again, or remove it") if path.exists() else {}
    return [f"{name} {settings[name]}" for name, neutral in _UNUSED.items() if settings.get(name) not in neutral]


def source_hash(folder: Path) -> str:
    """Return a hash of the copied weights and tokenizer."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _check(folder: Path) -> DecoderConfig:
    """Reject folders that hold another kind of model. Raises Refused or CheckpointError."""
    raw = json_object(folder / "config.json", _folder_to_give(folder))
    kind = str(raw.get("model_type"))
    if kind in _ENCODER_DECODERS or raw.get("is_encoder_decoder"):
        fix = "its SIDs can be kept: `tailrace pipeline --index FILE` trains a decoder on them"
        raise Refused("config.json", "model_type", f"{kind} is an encoder and a decoder", fix)
    if kind not in FAMILIES:
        fix = f"convert it to one of {', '.join(FAMILIES)}, or keep its SIDs: `tailrace pipeline --index FILE`"
        raise Refused("config.json", "model_type", f"{kind} is not supported", fix)
    readme = folder / "README.md"
    is_delta = folder.name.endswith("-delta") or (
        readme.exists()
        and re.search(r"delta weights|weight deltas?\b", readme.read_text(errors="replace"), re.IGNORECASE)
    )
    if is_delta:
        fix = "add it to its base first (the framework's apply_delta), then import the sum"
        raise Refused(folder.name, "", "the weights are a delta on another checkpoint", fix)
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled and not any((folder / name).exists() for name in _WHOLE):
        fix = (
            "save it with AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER, safe_serialization=True)"
        )
        raise Refused(pickled[0], "", "pickle is not read, and model.safetensors is missing", fix)
    return read_config(folder)


def _refuse_heads(folder: Path, config: DecoderConfig) -> None:
    """Reject tensors outside the language model. Raises Refused."""
    known = {f"{module}.{kind}" for module in checkpoint_names(config).values() for kind in ("weight", "bias")}
    known.add("lm_head.weight")
    names = [name for path in weight_files(folder) for name in _names_in(path)]
    extra = sorted(name for name in names if name not in known and not name.endswith(".rotary_emb.inv_freq"))
    if extra:
        shown = ", ".join(extra[:3])
        ends = tuple(f".{name.removeprefix('model.')}" for name in known)
        if all(f".{name}".endswith(ends) for name in extra):
            fix = "save the causal language model itself, without a wrapper (DDP, torch.compile) and not only its base"
        else:
            fix = "save only the language model; a second ranking head is not served"
        raise Refused("model.safetensors", f"tensor {extra[0]}", f"{len(extra)} unknown tensors ({shown})", fix)


def _names_in(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            header: Mapping[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise Refused(path.name, "", f"not readable ({error!r:.80})", "copy the file again") from error
    return [name for name in header if name != "__metadata__"]


def _folder_to_give(folder: Path) -> str:
    """Return advice: the newest checkpoint of a training's folder, or of a folder of the Hugging Face cache."""
    configs = [path for pattern in ("snapshots/*/", "checkpoint-*/") for path in folder.glob(f"{pattern}config.json")]
    newest = max(configs, key=lambda path: path.stat().st_mtime, default=None)
    return f"give {newest.parent}" if newest else "give the folder that save_pretrained wrote"


def _base_of(adapter: Path, base: Path | None) -> Path:
    """Return the folder of an adapter's base. Raises Refused."""
    about = json_object(adapter / ADAPTER_CONFIG, "save the adapter again")
    if about.get("peft_type", "LORA") != "LORA" or about.get("use_dora"):
        fix = "merge it into its base first (peft: merge_and_unload, then save_pretrained)"
        raise Refused(ADAPTER_CONFIG, "peft_type", f"{about.get('peft_type')} is not folded", fix)
    named = str(about.get("base_model_name_or_path", ""))
    folder = base or next((path for path in (Path(named), adapter / named) if named and path.is_dir()), None)
    if folder is None or not folder.is_dir():
        raise Refused(
            ADAPTER_CONFIG, "base_model_name_or_path", f"folder {named!r} not found", "give its folder with --base"
        )
    return folder


def _fold(adapter: Path, base: Path, out: Path) -> None:
    """Write base + (alpha / r) B A, and the modules that were saved whole, as one file. Raises Refused."""
    about = read_adapter_config(adapter / ADAPTER_CONFIG, _FOLDED)
    if not (adapter / ADAPTER_WEIGHTS).exists():
        fix = "save the adapter with safe_serialization=True"
        raise Refused(ADAPTER_WEIGHTS, "", "missing; pickle is not read", fix)
    tensors = {name: tensor for path in weight_files(base) for name, tensor in read_tensors(path).items()}
    pairs, whole = split_tensors(read_tensors(adapter / ADAPTER_WEIGHTS))
    if not (pairs or whole):
        raise Refused(ADAPTER_WEIGHTS, "", "no matrices", "save the adapter after its training")
    tensors |= whole
    for module, pair in pairs.items():
        weight = tensors.get(f"{module}.weight")
        if any(name.startswith("embedding") for name in pair):
            fix = "merge it into its base first (peft: merge_and_unload)"
            raise Refused(ADAPTER_WEIGHTS, f"module {module}", "an adapter of embeddings is not folded", fix)
        if weight is None or pair.keys() != {"A", "B"}:
            raise Refused(
                ADAPTER_WEIGHTS, f"module {module}", "no such module in the base", "give the adapter's own base"
            )
        tensors[f"{module}.weight"] = _folded(about, module, weight, pair)
    config = json.loads((base / "config.json").read_text())
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is not None:
        config["vocab_size"] = len(embedding)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")


def _folded(about: Mapping[str, Any], module: str, weight: Tensor, pair: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of a weight and its adapter, computed in fp32."""
    scale = scale_of(about, module, int(pair["A"].shape[0]))
    delta = LowRank(pair["A"], pair["B"], scale).delta_NI
    if about.get("fan_in_fan_out"):
        delta = delta.T
    if delta.shape != weight.shape:
        problem = f"{tuple(delta.shape)} on a weight of {tuple(weight.shape)}"
        raise Refused(ADAPTER_WEIGHTS, f"module {module}", problem, "give the adapter's own base")
    return (weight.float() + delta).to(weight.dtype)


def check_loads(folder: Path) -> int:
    """Load the decoder once and return its number of parameters. Raises CheckpointError."""
    from models.decoder.weights import load_decoder

    try:
        decoder = load_decoder(folder, torch.bfloat16, "cpu")
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: not loadable ({error})") from error
    return sum(parameter.numel() for parameter in decoder.parameters())
