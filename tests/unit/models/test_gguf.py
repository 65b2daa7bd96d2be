"""A GGUF file is converted to a folder with the same logits and tokens; errors name missing parts."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from models.decoder.gguf import convert_gguf
from models.decoder.weights import load_decoder
from models.errors import CheckpointError
from tests.support.engine.checkpoints import LINES, SPECIAL, build_tokenizer
from tests.support.engine.dense import logits_of
from tests.support.engine.hub_models import build_hub_model, hub_logits, largest_difference

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
RULES = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}
LIBRARY = build_tokenizer()
HEADS, KV_HEADS = 4, 2
THETA = 500_000.0


def build(family: str, *, tied: bool) -> Any:
    """Build a random model of a family over the tokenizer's vocabulary."""
    return build_hub_model(
        CONFIGS[family],
        vocab_size=LIBRARY.get_vocab_size(),
        head_dim=16 if family == "qwen3" else 8,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )


def in_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute the rows of each head as llama.cpp's converter does."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path, model: Any, family: str, *, left_out: str = "", keys: dict[str, Any] | None = None, **changed: Any
) -> None:
    """Write a model as GGUF.

    Args:
        left_out: tensors whose name contains this text are omitted.
        keys: additional metadata.
        changed: additional tensors by name; `architecture`, `tokenizer` and `rule` override metadata, `ends` adds
            tokens.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, changed.pop("architecture", family))
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(config.head_dim if family == "qwen3" else 8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(THETA)
    vocabulary = LIBRARY.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += changed.pop("ends", ())
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{family}.{key}", value)
    writer.add_tokenizer_model(changed.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(changed.pop("rule", RULES[family]))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(LIBRARY.to_str())["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), 2)
    for name, tensor in model.state_dict().items():
        if (left_out and left_out in name) or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        values = tensor.numpy()
        for part, num_heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if family == "llama" and part in name:
                values = in_pairs(values, num_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    for name, value in changed.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(path: Path, folder: Path) -> list[tuple[int, int]]:
    """Convert a file and return the reported progress."""
    progress: list[tuple[int, int]] = []
    convert_gguf(path, folder, lambda done, total: progress.append((done, total)))
    return progress


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_logits_survive_the_conversion(family: str, tied: bool, tmp_path: Path) -> None:
    """The converted folder gives the original model's logits, here and in transformers."""
    model = build(family, tied=tied)
    write_gguf(tmp_path / "m.gguf", model, family)

    progress = convert(tmp_path / "m.gguf", tmp_path / "out")
    tokens_T = torch.randint(0, LIBRARY.get_vocab_size(), (60,))
    ours = logits_of(load_decoder(tmp_path / "out", torch.float32, "cpu"), tokens_T)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    wanted, theirs = (hub_logits(decoder, tokens_T) for decoder in (model, reloaded))

    assert torch.equal(theirs, wanted)
    assert float((ours - wanted).abs().max()) < 1e-4
    assert progress == [(done, len(progress)) for done in range(1, len(progress) + 1)]


def test_the_tokenizer_and_its_configs_survive(tmp_path: Path) -> None:
    """The conversion keeps tokens, special tokens, the EOS token and the chat template."""
    write_gguf(tmp_path / "m.gguf", build("qwen2", tied=True), "qwen2")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    converted = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())

    for text in (*LINES, "<|user|>hi<|end|>", "x = 12345  \n\n  y"):
        assert converted.decode(converted.encode(text).ids, skip_special_tokens=False) == text
    assert converted.encode(LINES[0]).ids == LIBRARY.encode(LINES[0]).ids
    assert converted.encode("<|user|>hi").tokens[0] == "<|user|>"
    assert config["eos_token"] == "<|end|>"
    assert config["chat_template"] == "{{ messages[0]['content'] }}"
    assert generation["eos_token_id"] == [0]


def test_llama_3_scaling_is_found_in_its_divisors(tmp_path: Path) -> None:
    """The stored tensor of RoPE divisors is converted back to the llama3 scaling that produced it."""
    rates = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {"rope_type": "llama3", **rates, "original_max_position_embeddings": 8192}
    model = build("llama", tied=True)
    model.config.rope_parameters = {"rope_theta": THETA, **scaling}
    rescaled = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain = THETA ** -(np.arange(0, 8, 2) / 8)
    divisors = (plain / rescaled.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", model, "llama", **{"rope_freqs.weight": divisors})

    convert(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())

    assert config["rope_parameters"] == {"rope_theta": THETA, **scaling}


YARN = {"rope_type": "yarn", "factor": 4.0}
ATTENTION = 0.1 * math.log(4.0) + 1.0


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"scale_linear": 4.0, "scaling.factor": 4.0, "scaling.type": "linear"},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"scaling.factor": 1.0}, {"rope_type": "default"}),
        ({"scaling.factor": 0.0, "scaling.type": "none"}, {"rope_type": "default"}),
        ({"scaling.type": "linear"}, {"rope_type": "default"}),
        ({"scaling.factor": 4.0, "scaling.type": "yarn", "scaling.finetuned": True}, YARN),
        (
            {"scaling.factor": 4.0, "scaling.type": "yarn", "scaling.original_context_length": 32},
            {**YARN, "original_max_position_embeddings": 32.0},
        ),
        (
            {"scaling.factor": 4.0, "scaling.type": "yarn", "scaling.attn_factor": 0.5, "scaling.yarn_beta_fast": 8.0},
            {**YARN, "beta_fast": 8.0, "attention_factor": 0.5 * ATTENTION},
        ),
    ],
)
def test_each_way_to_scale_positions_is_read(keys: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    """RoPE scaling keys are read as in llama.cpp: a factor without a type is linear, also under its older name."""
    model = build("llama", tied=True)
    write_gguf(tmp_path / "m.gguf", model, "llama", keys={f"rope.{key}": value for key, value in keys.items()})

    convert(tmp_path / "m.gguf", tmp_path / "out")
    model.config.rope_parameters = {"rope_theta": THETA, **rope}
    scaled = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    scaled.load_state_dict(model.state_dict())

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": THETA, **rope}
    assert largest_difference(scaled, load_decoder(tmp_path / "out", torch.float32, "cpu")) < 1e-4


@pytest.mark.parametrize(
    ("ends", "kept"),
    [
        (("<|eot_id|>", "<|im_end|>"), {"<|eot_id|>", "<|im_end|>", "<|end|>"}),
        (
            ("<|end_of_text|>", "<|eom_id|>", "<end_of_turn>"),
            {"<|end_of_text|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"},
        ),
        (("<|endoftext|>", "<|file_sep|>"), {"<|endoftext|>", "<|file_sep|>", "<|end|>"}),
        (("<|return|>", "<|call|>"), {"<|return|>", "<|call|>", "<|end|>"}),  # the last is its eos
        (("<|turn_over|>",), {"<|end|>"}),
    ],
)
def test_an_end_of_turn_is_recognised_by_its_name(ends: tuple[str, ...], kept: set[str], tmp_path: Path) -> None:
    """A known end-of-turn token is an EOS token and adds no text, even if the file does not mark it as special."""
    write_gguf(tmp_path / "m.gguf", build("llama", tied=True), "llama", ends=ends)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    converted = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for name in ("config.json", "generation_config.json"):
        ids = json.loads((tmp_path / "out" / name).read_text())["eos_token_id"]

        assert {converted.id_to_token(token_id) for token_id in ids} == kept
    for name in kept:
        ids = converted.encode(f"on {name}").ids
        assert ids[-1] == converted.token_to_id(name)
        assert converted.decode(ids) == "on "


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"keys": {"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}},
            "scaling.factor and rope.scale_linear differ",
        ),
        ({"keys": {"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}}, "type none and a factor of 4.0 differ"),
        ({"keys": {"rope.scaling.type": "yarn"}}, "key scaling.factor is missing"),
        ({"keys": {"rope.scaling.type": "longrope"}}, "rope.scaling.type 'longrope' is not supported"),
        ({"keys": {"rope.scaling.attn_factor": 2.0}}, "attn_factor is not supported with rope.scaling.type none"),
        ({"keys": {"rope.scaling.alpha": 2.0}}, "rope key scaling.alpha is not supported"),
        ({"keys": {"rope.freq_base_swa": 2.0}}, "rope key freq_base_swa is not supported"),
        ({"keys": {"rope.dimension_count": 4}}, "rope.dimension_count other than the head size"),
        ({"keys": {"attention.value_length": 4}}, "attention.value_length other than key_length"),
        ({"keys": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping 30.0 is not supported"),
        ({"keys": {"logit_scale": 8.0}}, "logit_scale 8.0 is not supported"),
        ({"architecture": "gemma"}, "architecture 'gemma' is not supported"),
        ({"tokenizer": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"rule": "deepseek"}, "tokenizer.ggml.pre 'deepseek' is not supported"),
        ({"blk.0.ssm_a": np.zeros(3, dtype=np.float32)}, "tensor blk.0.ssm_a is not known"),
        ({"rope_freqs.weight": np.array([1, 2, 9, 1], dtype=np.float32)}, "rope_freqs.weight"),
    ],
)
def test_what_is_not_supported_is_named(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The error names the file and the unsupported key or tensor."""
    write_gguf(tmp_path / "m.gguf", build("llama", tied=True), "llama", **given)

    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{message}"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """A missing tensor is named when the folder is loaded; an invalid GGUF file is rejected at conversion."""
    write_gguf(tmp_path / "m.gguf", build("llama", tied=True), "llama", left_out="layers.1.mlp.up_proj")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf file at all, only bytes")

    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_decoder(tmp_path / "out", torch.float32, "cpu")
    with pytest.raises(CheckpointError, match=r"bad\.gguf: not readable as GGUF"):
        convert(tmp_path / "bad.gguf", tmp_path / "other")


@pytest.mark.parametrize("claimed", [1_000_000_000_000, 5_000_000])
def test_a_claimed_length_takes_no_memory(claimed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Array lengths are limited by the file size and by the maximum number of values."""
    path = tmp_path / "m.gguf"
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    field = struct.pack("<Q1sIIQ", 1, b"a", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8, claimed)
    path.write_bytes(head + field + bytes(3_000))
    monkeypatch.setattr("models.decoder.gguf._MAX_VALUES", 10_000 if claimed > 10**9 else 1_000)

    with pytest.raises(CheckpointError, match="cut off" if claimed > 10**9 else "more than 1000 values"):
        convert_gguf(path, tmp_path / "out", lambda _done, _total: None)
