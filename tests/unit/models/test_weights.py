"""Checkpoint folders: what transformers writes we read, what we write transformers reads, and the rest is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from models.decoder.weights import load_decoder, save_decoder
from services.errors import CheckpointError
from tests.support.dense import logits_of


def build_llama(*, tied: bool, kv_heads: int, theta: float = 10_000.0) -> LlamaForCausalLM:
    """Build a small random Llama of transformers in fp32."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        head_dim=10,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that transformers wrote."""
    build_llama(tied=True, kv_heads=2).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("tied", "kv_heads", "shard_size"), [(True, 2, "1GB"), (False, 1, "20KB"), (True, 6, "20KB")])
def test_logits_equal_transformers(tmp_path: Path, tied: bool, kv_heads: int, shard_size: str) -> None:
    """A folder written by transformers, whole or in shards, gives transformers' own logits in fp32."""
    llama = build_llama(tied=tied, kv_heads=kv_heads, theta=500_000.0)
    llama.save_pretrained(tmp_path, max_shard_size=shard_size)
    tokens = torch.randint(0, 97, (33,))

    decoder = load_decoder(tmp_path, torch.float32, "cpu")

    with torch.inference_mode():
        expected = llama(tokens[None]).logits[0]
    assert (logits_of(decoder, tokens) - expected).abs().max() < 1e-4
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_what_is_saved(tmp_path: Path, tied: bool) -> None:
    """A folder written by us loads in transformers with the same logits, and again here with the same weights."""
    build_llama(tied=tied, kv_heads=3).save_pretrained(tmp_path / "theirs")
    decoder = load_decoder(tmp_path / "theirs", torch.float32, "cpu")
    tokens = torch.randint(0, 97, (20,))

    save_decoder(decoder, tmp_path / "ours")

    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    with torch.inference_mode():
        assert (theirs(tokens[None]).logits[0] - logits_of(decoder, tokens)).abs().max() < 1e-4
    again = load_decoder(tmp_path / "ours", torch.float32, "cpu")
    assert again.config == decoder.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in decoder.state_dict().items())


def test_dtype_is_the_one_asked_for(folder: Path) -> None:
    """Weights arrive in the dtype that was asked for, whatever the file holds."""
    decoder = load_decoder(folder, torch.bfloat16, "cpu")

    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown: extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"misshapen: model.norm.weight is \(3,\), not \(48,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}),
            "not of real numbers: model.norm.weight",
        ),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, change: object, said: str) -> None:
    """A tensor that is missing, unknown, misshapen or of whole numbers, as a quantised one is, is named."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors")

    with pytest.raises(CheckpointError, match=said):
        load_decoder(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", None, "hidden_size is missing"),
        ("model_type", "mamba", "model_type 'mamba' is not supported"),
        ("rope_parameters", {"rope_type": "longrope", "factor": 4.0}, "rope_type 'longrope' is not supported"),
        ("rope_parameters", {"rope_type": "yarn"}, "key factor is missing"),
        ("use_sliding_window", True, "use_sliding_window True is not supported"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
        ("num_attention_heads", 0, "num_attention_heads 0 is not positive"),
        ("num_key_value_heads", 4, "num_attention_heads is no multiple of num_key_value_heads 4"),
        ("head_dim", 5, "head_dim 5 is odd"),
        ("vocab_size", [], "config.json: not a decoder's config"),
        ("rope_parameters", "yarn", "config.json: not a decoder's config"),
        ("attention_bias", True, r"missing: model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(folder: Path, key: str, value: object, said: str) -> None:
    """What the decoder cannot do is refused by its key, never ignored."""
    raw = json.loads((folder / "config.json").read_text())
    raw.pop(key, None)
    if value is not None:
        raw[key] = value
    (folder / "config.json").write_text(json.dumps(raw))

    with pytest.raises(CheckpointError, match=said):
        load_decoder(folder, torch.float32, "cpu")


@pytest.mark.parametrize("content", [b"[1]", b"\xff\xfe", b"{"])
def test_a_file_that_is_no_config_is_refused(folder: Path, content: bytes) -> None:
    """A file of another kind is refused by its path."""
    (folder / "config.json").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"config\.json: not a"):
        load_decoder(folder, torch.float32, "cpu")


@pytest.mark.parametrize("content", ["[1]", "{", "{}", '{"weight_map": {"a": 1}}'])
def test_a_file_that_is_no_index_is_refused(folder: Path, content: str) -> None:
    """Where there are shards alone, an index of another form is refused by its path."""
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)

    with pytest.raises(CheckpointError, match=r"index\.json: not an index of shards"):
        load_decoder(folder, torch.float32, "cpu")


def test_a_single_file_takes_precedence_over_stale_shards(tmp_path: Path) -> None:
    """Weights saved into a folder in which shards lay are the ones that load, as in transformers."""
    build_llama(tied=True, kv_heads=2).save_pretrained(tmp_path, max_shard_size="20KB")
    decoder = load_decoder(tmp_path, torch.float32, "cpu")
    decoder.norm.weight.data.fill_(7.0)

    save_decoder(decoder, tmp_path)

    assert load_decoder(tmp_path, torch.float32, "cpu").norm.weight.eq(7.0).all()


def test_an_absent_or_torn_file_is_named(folder: Path) -> None:
    """Weights that are cut short or absent are named with their path."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not readable"):
        load_decoder(folder, torch.float32, "cpu")
    path.unlink()

    with pytest.raises(CheckpointError, match=r"model\.safetensors: not readable"):
        load_decoder(folder, torch.float32, "cpu")
