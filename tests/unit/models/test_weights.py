"""Checkpoint folders: transformers and Tailrace read each other's folders; errors name what is unsupported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import LlamaConfig

from models.decoder.weights import load_decoder, save_decoder
from models.errors import CheckpointError
from tests.support.engine.hub_models import build_hub_model, largest_difference

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder saved by transformers."""
    build_hub_model(LlamaConfig).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("tied", "kv_heads"), [(False, 1), (True, 4)])
def test_shards_are_read(tmp_path: Path, tied: bool, kv_heads: int) -> None:
    """Sharded folders load with transformers' logits in fp32 and in any dtype; an unsharded file takes precedence."""
    llama = build_hub_model(LlamaConfig, tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    llama.save_pretrained(tmp_path, max_shard_size="20KB")

    decoder = load_decoder(tmp_path, torch.float32, "cpu")

    assert (tmp_path / INDEX).exists()
    assert largest_difference(llama, decoder) < 1e-4
    assert load_decoder(tmp_path, torch.bfloat16, "cpu").norm.weight.dtype == torch.bfloat16
    decoder.norm.weight.data.fill_(7.0)
    save_decoder(decoder, tmp_path)
    assert load_decoder(tmp_path, torch.float32, "cpu").norm.weight.eq(7.0).all()


def test_a_tied_matrix_is_read_from_the_head_s_name(tmp_path: Path) -> None:
    """`safetensors.torch.save_model` stores shared matrices once, under the name that comes first in the alphabet."""
    llama = build_hub_model(LlamaConfig, tie_word_embeddings=True)
    llama.save_pretrained(tmp_path)
    save_model(llama, str(tmp_path / "model.safetensors"))

    assert "model.embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    assert largest_difference(llama, load_decoder(tmp_path, torch.float32, "cpu")) < 1e-4


ZEROS, INTEGERS = torch.zeros(3), torch.ones(32, dtype=torch.int8)
NOT_A_NUMBER = torch.full((32,), torch.nan, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "missing: model.norm.weight"),
        ("extra", ZEROS, "unknown: extra"),
        ("model.norm.weight", ZEROS, r"misshapen: model.norm.weight is \(3,\), not \(32,\)"),
        ("model.norm.weight", INTEGERS, "not of real numbers: model.norm.weight"),
        ("model.norm.weight", NOT_A_NUMBER, "not finite: model.norm.weight"),
        ("model.norm.weight", ZEROS.new_full((32,), torch.inf), "not finite: model.norm.weight"),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    """The error names a tensor that is missing, unknown, misshapen, not finite or of integers."""
    tensors = load_file(folder / "model.safetensors") | {name: tensor}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")

    with pytest.raises(CheckpointError, match=message):
        load_decoder(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", None, "misshapen: model.embed_tokens.weight is .61, 32., not .61, 4096."),
        ("hidden_size", "32", "hidden_size '32' is not a number"),
        ("hidden_size", 32.5, "hidden_size 32.5 is not a whole number"),
        ("tie_word_embeddings", "false", "tie_word_embeddings 'false' is neither true nor false"),
        ("rms_norm_eps", 0, "rms_norm_eps 0 is not positive"),
        ("rope_theta", 5e5, "rope_theta 10000.0 and rope_theta 500000.0 differ"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_parameters and rope_scaling differ"),
        ("rope_parameters", {"factor": 2.0}, "rope key factor is unknown for rope_type 'default'"),
        ("rope_parameters", {"type": "linear", "rope_type": "yarn", "factor": 2.0}, "'yarn' and type 'linear' differ"),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}, "rope key full_attention is unknown"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 2.0}, "key low_freq_factor is missing"),
        ("rope_parameters", {"rope_type": "linear", "factor": 0}, "factor 0 is not positive"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}, "rope key mscale is unknown"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor 0.5 is not supported"),
        ("rotary_pct", 0.5, "rotary_pct 0.5 is not supported"),
        ("rope_local_base_freq", 1e4, "rope_local_base_freq 10000.0 is not supported"),
        ("final_logit_softcapping", 30.0, "final_logit_softcapping 30.0 is not supported"),
        ("logits_scaling", 8, "logits_scaling 8 is not supported"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config: quantised weights are not supported"),
        ("compression_config", {"format": "pack"}, "compression_config: quantised weights are not supported"),
        ("num_experts", 8, "num_experts 8 is not supported"),
        ("sliding_window", 16, "sliding_window 16 is not supported"),
        ("architectures", ["MistralForCausalLM"], "model_type 'llama' and architectures"),
        ("model_type", "mamba", "model_type 'mamba' is not supported"),
        ("rope_parameters", {"rope_type": "longrope", "factor": 4.0}, "rope_type 'longrope' is not supported"),
        ("rope_parameters", {"rope_type": "yarn"}, "key factor is missing"),
        ("use_sliding_window", True, "use_sliding_window True is not supported"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not supported"),
        ("num_attention_heads", 0, "num_attention_heads 0 is not positive"),
        ("num_hidden_layers", 10**12, "num_hidden_layers 1000000000000 is over 1000"),
        ("vocab_size", 10**12, "vocab_size 1000000000000 is over 16777216"),
        ("num_key_value_heads", 3, "num_attention_heads is not a multiple of num_key_value_heads 3"),
        ("head_dim", 5, "head_dim 5 is odd"),
        ("vocab_size", [], "vocab_size \\[\\] is not a number"),
        ("rope_parameters", "yarn", "rope_parameters 'yarn' is not an object"),
        ("layer_types", ["sliding_attention", "full_attention"], "sliding_window is not set"),
        ("layer_types", ["chunked_attention", "full_attention"], "layer_types .*chunked_attention.* is not supported"),
        ("layer_types", ["full_attention"], "layer_types .* is not supported"),
        ("attention_bias", True, r"missing: model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(folder: Path, key: str, value: object, message: str) -> None:
    """The error names each unsupported config key; no such key is ignored."""
    raw = json.loads((folder / "config.json").read_text())
    raw.pop(key, None)
    if value is not None:
        raw[key] = value
    (folder / "config.json").write_text(json.dumps(raw))

    with pytest.raises(CheckpointError, match=message):
        load_decoder(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("config.json", (b"[1]", b"\xff\xfe", b"{"), r"config\.json: not a"),
        (INDEX, (b"[1]", b"{", b"{}", b'{"weight_map": {"a": 1}}'), r"index\.json: not an index of shards"),
        ("model.safetensors", (b"", b"\x08" * 100), r"model\.safetensors: not readable"),
    ],
)
def test_an_unreadable_file_is_named(folder: Path, name: str, contents: tuple[bytes, ...], message: str) -> None:
    """The error names the path of a malformed, truncated or missing file."""
    if name == INDEX:
        (folder / "model.safetensors").unlink()
    for content in contents:
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            load_decoder(folder, torch.float32, "cpu")
    (folder / name).unlink()

    with pytest.raises(CheckpointError):
        load_decoder(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("pytorch_model.bin", "M.from_pretrained"),
        ("consolidated.00.pth", "M.from_pretrained"),
        ("m.gguf", "give the file"),
    ],
)
def test_weights_in_another_form_name_the_way_to_convert_them(folder: Path, name: str, fix: str) -> None:
    """A pickled or GGUF checkpoint is not read; the error names the way to convert it."""
    (folder / "model.safetensors").rename(folder / name)

    with pytest.raises(CheckpointError, match=fix) as refusal:
        load_decoder(folder, torch.float32, "cpu")

    assert name in str(refusal.value)


def test_loading_weights_draws_none(folder: Path) -> None:
    """A fresh process loads a decoder without torch's compiler, which torch imports to draw weights on `meta`."""
    script = (
        "import sys, torch; from pathlib import Path; from models.decoder.weights import load_decoder; "
        "load_decoder(Path(sys.argv[1]), torch.float32, 'cpu'); sys.exit('torch._dynamo' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", script, str(folder)], check=False)

    assert done.returncode == 0
