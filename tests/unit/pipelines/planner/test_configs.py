"""Decoder shapes from `config.json`: parameters against transformers, stored bytes against published checkpoints."""

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.decoder.config import read_config
from models.errors import CheckpointError, InvalidRequest, TailraceError
from pipelines.planner.configs import read_shape, shape_from, shape_from_config
from pipelines.planner.families import FAMILIES, SAME_AS, defaults_of
from pipelines.planner.memory import kv_bytes
from pipelines.planner.shapes import DecoderShape, shape_of
from pipelines.planner.storage import UnplannedConfig

Raw = dict[str, Any]
SMALL: Raw = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 128,
}
PLAIN: Raw = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
FALCON: Raw = {key: value for key, value in PLAIN.items() if key != "intermediate_size"} | {"ffn_hidden_size": 96}
OPT: Raw = PLAIN | {"ffn_dim": 96, "word_embed_proj_dim": 64}
GPT: Raw = {"n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 200, "n_positions": 128}
MOE: Raw = SMALL | {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT: Raw = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
ROUTED: Raw = MOE | LATENT | {"n_routed_experts": 8, "n_shared_experts": 2, "num_key_value_heads": 8}
GROUPS: Raw = {"n_group": 1, "topk_group": 1}
QUICK = [
    ("llama", SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen3", SMALL | {"head_dim": 16}),
    ("gemma2", SMALL | {"head_dim": 12}),
    ("gpt2", GPT | {"n_inner": 100}),
    ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("mixtral", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    ("qwen2_moe", MOE | {"num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("deepseek_v3", ROUTED | GROUPS | {"first_k_dense_replace": 2}),
    ("gpt_oss", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
]
MORE = [
    ("mistral", SMALL),
    ("qwen2", SMALL | {"tie_word_embeddings": True}),
    ("qwen3", SMALL | {"attention_bias": True, "head_dim": 16}),
    ("gemma", SMALL | {"head_dim": 32, "num_key_value_heads": 1}),
    ("gemma3_text", SMALL | {"head_dim": 12}),
    ("phi", SMALL | {"qk_layernorm": True, "num_key_value_heads": 8}),
    ("phi3", SMALL | {"pad_token_id": 0}),
    ("phimoe", SMALL | {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    ("gpt_neox", PLAIN | {"attention_bias": False}),
    ("gpt_neo", {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]}),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", GPT | {"multi_query": False}),
    ("gptj", GPT | {"rotary_dim": 4}),
    ("codegen", GPT | {"rotary_dim": 4}),
    ("starcoder2", SMALL | {"use_bias": False}),
    ("opt", OPT | {"enable_bias": False}),
    ("opt", OPT | {"do_layer_norm_before": False}),
    ("opt", OPT | {"layer_norm_elementwise_affine": False}),
    ("falcon", FALCON | {"multi_query": False, "bias": True, "alibi": True}),
    ("falcon", FALCON | {"parallel_attn": False}),
    ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}),
    ("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 8, "vocab_size": 200}),
    ("mpt", {"d_model": 64, "n_layers": 3, "n_heads": 8, "vocab_size": 200}),
    ("stablelm", SMALL | {"use_qkv_bias": True, "qk_layernorm": True}),
    ("stablelm", SMALL | {"use_parallel_residual": True}),
    ("cohere", SMALL | {"use_qk_norm": True}),
    ("cohere2", SMALL),
    ("olmo", SMALL),
    ("olmo2", SMALL),
    ("olmo3", SMALL),
    ("olmoe", SMALL | {"num_experts": 4, "num_experts_per_tok": 2}),
    ("granite", SMALL | {"attention_bias": True}),
    ("granitemoe", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("nemotron", SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    ("qwen2_moe", MOE | {"num_experts": 6, "shared_expert_intermediate_size": 48, "qkv_bias": False}),
    ("qwen3_moe", MOE | {"num_experts": 6, "head_dim": 16, "decoder_sparse_step": 3}),
    ("deepseek_v2", ROUTED | {"q_lora_rank": None, "first_k_dense_replace": 1, "attention_bias": True}),
    ("minicpm3", SMALL | LATENT | {"num_key_value_heads": 8, "attention_bias": True}),
    ("llama4_text", SMALL | {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 112, "head_dim": 8}),
    ("glm", SMALL | {"head_dim": 8, "attention_bias": True, "pad_token_id": 0}),
    ("glm4", SMALL | {"head_dim": 8, "pad_token_id": 0}),
    ("glm4_moe", MOE | GROUPS | {"n_routed_experts": 8, "n_shared_experts": 1, "use_qk_norm": True, "head_dim": 16, "attention_bias": True}),
    ("dots1", MOE | GROUPS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    ("ernie4_5", SMALL | {"use_bias": True, "head_dim": 8}),
    ("ernie4_5_moe", SMALL | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 2, "use_bias": True}),
    ("exaone4", SMALL),
    ("hunyuan_v1_dense", SMALL | {"head_dim": 8}),
    ("seed_oss", SMALL | {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}),
    ("smollm3", SMALL | {"pad_token_id": 0}),
    ("internlm3", SMALL | {"head_dim": 8}),
    ("helium", SMALL | {"head_dim": 8}),
    ("arcee", SMALL),
    ("apertus", SMALL),
    ("persimmon", PLAIN),
    ("minimax_m2", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    ("ministral", SMALL | {"head_dim": 16}),
    ("ministral3", SMALL | {"head_dim": 16}),
    ("nanochat", SMALL),
]  # fmt: skip


def ours(model_type: str, changes: Raw) -> DecoderShape:
    return shape_from_config({"model_type": model_type} | changes, "x")


@pytest.mark.grid
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [*QUICK, *MORE],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_and_windows_are_those_of_transformers(model_type: str, changes: Raw) -> None:
    """Parameter counts equal transformers', including absent keys, and so do the numbers of windowed layers."""
    transformers: Any = pytest.importorskip("transformers")
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(model_type, **changes)
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = ours(model_type, changes)
    types = getattr(config, "layer_types", None) or ()

    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    if types:
        assert len(shape.windows) == sum(kind in {"sliding_attention", "chunked_attention"} for kind in types)


@pytest.mark.grid
def test_absent_keys_have_the_families_defaults() -> None:
    """Defaults equal the defaults of transformers' config classes, and the shape's notes name assumed values."""
    mapping: Any = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    known = [name for name in FAMILIES if name in mapping]
    differing = {
        (name, key): value
        for name in known
        for key, value in defaults_of(name).items()
        if getattr(mapping[name], key, value) != value
    }

    assert len(known) > 50
    assert differing == {}
    assert any("num_attention_heads 8" in note for note in ours("gemma3_text", {"num_hidden_layers": 34}).notes)


def test_served_families_have_the_shape_of_our_own_decoder(tmp_path: Path) -> None:
    """Both config readers give the same sizes, parameters and windows."""
    for model_type, changes in (
        ("llama", {"rope_theta": 5e5}),
        ("mistral", {"sliding_window": 64, "attention_sinks": 4}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
        ("qwen3", {"head_dim": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}),
    ):  # fmt: skip
        raw = SMALL | {"model_type": model_type, "tie_word_embeddings": False} | changes
        (tmp_path / "config.json").write_text(json.dumps(raw))

        assert read_shape(tmp_path) == shape_of(read_config(tmp_path), tmp_path.name), model_type


PUBLISHED: list[tuple[float, Raw]] = [
    (6.922, {"model_type": "falcon", "num_kv_heads": 71, "alibi": False}),
    (41.836, {"model_type": "falcon", "hidden_size": 8_192, "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "tie_word_embeddings": False}),
    (15.517, {"model_type": "gpt_bigcode", "n_embd": 6_144, "n_head": 48, "n_inner": 24_576, "n_layer": 40, "n_positions": 8_192, "vocab_size": 49_152}),
    (7.069, {"model_type": "bloom", "n_embed": 4_096, "hidden_size": 4_096, "n_head": 32, "n_layer": 30}),
    (6.649, {"model_type": "mpt", "d_model": 4_096, "n_heads": 32, "n_layers": 32, "vocab_size": 50_432}),
    (6.658, {"model_type": "opt", "hidden_size": 4_096, "ffn_dim": 16_384, "num_hidden_layers": 32, "num_attention_heads": 32, "word_embed_proj_dim": 4_096}),
    (1.558, {"model_type": "gpt2", "n_embd": 1_600, "n_head": 25, "n_layer": 48, "n_ctx": 1_024}),
    (6.051, {"model_type": "gptj"}),
    (20.555, {"model_type": "gpt_neox"}),
    (7.738, {"model_type": "internlm2", "hidden_size": 4_096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 92_544, "bias": False}),
    (6.244, {"model_type": "chatglm", "ffn_hidden_size": 13_696, "hidden_size": 4_096, "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28, "padded_vocab_size": 65_024}),
    (7.721, {"model_type": "qwen", "hidden_size": 4_096, "intermediate_size": 22_016, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 151_936}),
    (131.597, {"model_type": "dbrx", "d_model": 6_144, "n_heads": 48, "n_layers": 40, "vocab_size": 100_352, "attn_config": {"kv_n_heads": 8}, "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4}}),
    (103.811, {"model_type": "cohere", "hidden_size": 12_288, "intermediate_size": 33_792, "num_attention_heads": 96, "num_hidden_layers": 64, "num_key_value_heads": 8, "use_qk_norm": True}),
    (15.706, {"model_type": "deepseek_v2", "hidden_size": 2_048, "intermediate_size": 10_944, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None, "num_attention_heads": 16, "num_hidden_layers": 27, "moe_intermediate_size": 1_408}),
    (1_026.408, {"model_type": "kimi_k2", "n_routed_experts": 384, "first_k_dense_replace": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163_840}),
    (671.026, {"model_type": "deepseek_v3"}),
    (27.009, {"model_type": "gemma3", "text_config": {"head_dim": 128, "hidden_size": 5_376, "intermediate_size": 21_504, "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16}, "vision_config": {"hidden_size": 1_152}}),
    (9.242, {"model_type": "gemma2", "hidden_size": 3_584, "intermediate_size": 14_336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8}),
    (12.248, {"model_type": "mistral", "head_dim": 128, "hidden_size": 5_120, "num_hidden_layers": 40, "vocab_size": 131_072, "sliding_window": None}),
    (107.770, {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}, "vision_config": {"a": 1}}),
    (7.616, {"model_type": "qwen2_5_vl", "hidden_size": 3_584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064}),
    (46.703, {"model_type": "mixtral"}),
    (20.915, {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("billions", "raw"), PUBLISHED, ids=lambda value: str(value) if isinstance(value, float) else ""
)
def test_published_models_have_their_published_parameters(billions: float, raw: Raw) -> None:
    """Parameter counts equal the published file sizes for different key names, nested configs, experts and MLA."""
    assert shape_from_config(raw, "x").num_parameters / 1e9 == pytest.approx(billions, abs=0.0006)


LLAMA_2: Raw = {"model_type": "llama", "torch_dtype": "float16"}
LLAMA_3: Raw = LLAMA_2 | {"intermediate_size": 14_336, "num_key_value_heads": 8, "vocab_size": 128_256}
MISTRAL: Raw = {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 4_096}
GPT_OSS: Raw = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
QWEN_MOE: Raw = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(weights: Raw, **others: Any) -> Raw:
    """Build a compressed-tensors config with a single group."""
    group = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": group, "ignore": ["lm_head"]} | others


@pytest.mark.parametrize(
    ("model", "quantization", "gigabytes"),
    [
        (LLAMA_3, compressed({"num_bits": 8, "type": "float"}), 9.08),
        (LLAMA_3, compressed(INT4), 5.70),
        (LLAMA_3, compressed(INT4, ignore=["re:.*self_attn.*", "lm_head"]), 7.69),
        (LLAMA_3, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 5.70),
        (LLAMA_3, {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}, 9.09),
        (LLAMA_3, {"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "lm_head"]}, 10.42),
        (LLAMA_3, {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, 9.08),
        (LLAMA_3, {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, 6.03),
        (LLAMA_2, {"quant_method": "gptq", "bits": 4, "group_size": 128}, 3.89),
        (LLAMA_2, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 3.89),
        (MISTRAL | {"model_type": "mixtral"}, {"quant_method": "awq", "bits": 4, "group_size": 128}, 24.65),
        (GPT_OSS, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, 13.76),
        (QWEN_MOE, {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}, 31.17),
        (LLAMA_3, None, 16.06),
        (LLAMA_3 | {"torch_dtype": "float32"}, None, 32.12),
    ],
)  # fmt: skip
def test_stored_weights_are_those_of_published_checkpoints(
    model: Raw, quantization: Raw | None, gigabytes: float
) -> None:
    """Linear layers take their bits plus scales, all other weights 16 bits, as in files on the model hub."""
    shape = shape_from_config(model | ({"quantization_config": quantization} if quantization else {}), "x")

    assert shape.weight_bytes / 1e9 == pytest.approx(gigabytes, abs=0.006)


@pytest.mark.parametrize(
    ("model", "length", "gigabytes"),
    [
        (MISTRAL, 32_768, 0.537),
        (MISTRAL | {"sliding_window": None}, 32_768, 4.295),
        ({"model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8}, 8_192, 2.114),
        ({"model_type": "deepseek_v3"}, 32_768, 2.303),
        (GPT_OSS, 131_072, 3.224),
        (LLAMA_3, 8_192, 1.074),
    ],
)  # fmt: skip
def test_a_contexts_keys_and_values_follow_windows_and_latent_vectors(
    model: Raw, length: int, gigabytes: float
) -> None:
    """Windowed layers hold their window, latent attention 576 numbers per layer, all other layers every token."""
    assert kv_bytes(shape_from_config(model, "x"), length) / 1e9 == pytest.approx(gigabytes, abs=0.001)


def test_a_token_passes_its_own_experts() -> None:
    """Active parameters match the published numbers of Mixtral-8x7B, Qwen3-30B-A3B and DeepSeek-V3."""
    for raw, total, active in ((MISTRAL | {"model_type": "mixtral"}, 46.7, 12.9), (QWEN_MOE, 30.5, 3.3), ({"model_type": "deepseek_v3"}, 671.0, 37.6)):  # fmt: skip
        shape = shape_from_config(raw, "x")

        assert shape.num_parameters / 1e9 == pytest.approx(total, abs=0.06)
        assert (shape.forward_weights + shape.table_parameters) / 1e9 == pytest.approx(active, abs=0.1)


def test_the_text_decoder_of_a_model_of_images_is_planned() -> None:
    """The text decoder uses the outer config's quantization, and the ignored towers are named."""
    outer = {
        "model_type": "llava",
        "text_config": LLAMA_3,
        "vision_config": {"hidden_size": 1_024},
        "quantization_config": {"quant_method": "fp8"},
    }
    shape = shape_from_config(outer, "x")

    assert shape.weight_bytes / 1e9 == pytest.approx(9.08, abs=0.006)
    assert any("vision_config" in note for note in shape.notes)
    assert shape_from_config({"model_type": "gemma3", "text_config": {}}, "x").windows


def test_keys_that_are_not_read_are_listed() -> None:
    """Unread keys that may affect bytes are named; an unknown family is planned by its sizes with a note."""
    notes = ours("llama", SMALL | {"side_adapter_rank": 8, "rope_theta": 1e4, "attention_dropout": 0.1}).notes
    unknown = ours("newformer", SMALL)

    assert [note for note in notes if "side_adapter_rank" in note and "rope_theta" not in note]
    assert unknown.num_parameters == ours("llama", SMALL).num_parameters
    assert "newformer" in unknown.notes[0]
    assert ours("newformer", SMALL | {"sliding_window": 16}).windows == (16,) * 5
    assert ours("newformer", SMALL | {"sliding_window": 16, "use_sliding_window": False}).windows == ()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"hidden_size": 1e400}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": [2, 4, 2, 4, 2]}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"n_embd": 32}, "hidden_size"),
        ({"num_local_experts": 4}, "num_experts_per_tok"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "bert"}, "model_type"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
        ({"model_type": "jamba"}, "model_type"),
        ({"state_size": 16}, "state_size"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"block_configs": [{"ffn": {}}]}, "block_configs"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
        ({"attention_bias": "maybe"}, "attention_bias"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, "quantization_config.bits"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"quantization_config": compressed(INT4, ignore=["re:("])}, "quantization_config"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_planned_is_refused_by_its_key(tmp_path: Path, changes: Raw, key: str) -> None:
    """The error names the key of an impossible size, an encoder, mixed layer kinds or an unknown method."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SMALL | changes))

    with pytest.raises(CheckpointError, match=f"config.json: .*{key.rsplit('.', maxsplit=1)[-1]}"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((Path("nowhere"), None, None), "MODEL"),
        ((None, None, None), "MODEL"),
        ((None, 1e6, None), "MODEL"),
        ((Path(), 1e6, 1e9), "MODEL"),
        ((Path(), None, None, 1e6), "--activation-mb"),
        ((None, 0.0, 1e9), "--parameters"),
        ((None, 1e6, float("nan")), "--flops"),
        ((None, 1e6, 1e9, -1.0), "--activation-mb"),
    ],
)
def test_missing_or_contradicting_sizes_are_refused_by_their_option(arguments: tuple[Any, ...], field: str) -> None:
    """The error names the option and the options to use instead."""
    with pytest.raises(TailraceError) as caught:
        shape_from(*arguments)

    assert isinstance(caught.value, InvalidRequest)
    assert (caught.value.field, bool(caught.value.fix)) == (field, True)


def mutations(rng: random.Random) -> Raw:
    """Build a config of some family with keys removed, swapped, or of other types and magnitudes."""
    values: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, False, "", "auto", "fp8", [], {}, [None], {"a": {}}]),
        lambda: rng.choice([0, -1, 1, 2, 3, 7, 64, 4_096, 2**24, 2**63, 10**300, 0.5, 1e400, float("nan")]),
        lambda: rng.choice([["full_attention"] * 5, ["sliding_attention"] * 5, [1] * 5, "LLLG", [[["local"], 5]]]),
        lambda: rng.choice([compressed(INT4), compressed({"num_bits": rng.choice([8, 4, None, "x", []])}), {"quant_method": rng.choice(["fp8", "gptq", "awq", "quark", "hqq", "torchao", None, 3])}]),
    ]  # fmt: skip
    model_type, changes = rng.choice(QUICK + MORE)
    raw: Raw = {"model_type": rng.choice([model_type, model_type, *SAME_AS, "unknown"])} | changes
    others = [*raw, *(key for _, case in QUICK for key in case), "quantization_config", "layer_types", "text_config", "attn_config", "ffn_config", "sliding_window", "sliding_window_pattern", "moe_layer_freq", "mlp_only_layers", "torch_dtype", "attention_types"]  # fmt: skip
    for _ in range(rng.randint(1, 4)):
        raw[rng.choice(others)] = rng.choice(values)()
    for part in ("quantization_config", "text_config", "attn_config"):
        if isinstance(raw.get(part), dict):
            keys = ["bits", "group_size", "ignore", "config_groups", "kv_n_heads", "hidden_size", "modules_to_not_convert", "weight_block_size", "quant_type"]  # fmt: skip
            raw[part] = raw[part] | {rng.choice(keys): rng.choice(values)()}
    return raw


@pytest.mark.parametrize("number", [300, pytest.param(3_000, marks=[pytest.mark.grid, pytest.mark.timeout(1_200)])])
def test_any_config_is_planned_or_refused_by_its_key(number: int, request: pytest.FixtureRequest) -> None:
    """A mutated config raises no other error; with `-m grid`, `--foreign-inputs` sets the number of configs."""
    number = request.config.getoption("--foreign-inputs") or number
    rng = random.Random(number)
    planned = 0
    for _ in range(number):
        raw = mutations(rng)
        try:
            shape = shape_from_config(raw, "x")
        except UnplannedConfig:
            continue
        planned += 1
        assert shape.weight_bytes > 0, raw
        assert kv_bytes(shape, 1_000) > 0, raw

    assert planned > number / 20
