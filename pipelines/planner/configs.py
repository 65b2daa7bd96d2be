"""A decoder's shape from any family's `config.json`, whether or not we serve the family.

Needs no weights, torch or transformers. Every key is read, known to change neither bytes nor FLOPs, refused by name, or
listed in the shape's notes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.decoder.config import FAMILIES as SERVED
from models.errors import CheckpointError, InvalidRequest
from pipelines.planner.families import FAMILIES, SAME_AS, Flag, LayerFamily, defaults_of
from pipelines.planner.shapes import DecoderShape, Experts, Latent, Shape, plain_shape
from pipelines.planner.storage import UnplannedConfig, number_bytes_of, storage_of

_MAX_SIZE, _MAX_LAYERS, _MAX_SHOWN = 2**24, 1_000, 60
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("padded_vocab_size", "vocab_size"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token"),
    "expert_size": ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
}
"""A size's names in the families' configs; the first name that is set counts."""
_FOUR_TIMES = {"gpt2", "gptj", "gpt_bigcode", "codegen", "gpt_neo", "bloom", "mpt", "falcon", "gpt-sw3"}
"""Families whose feed-forward layer is four times the hidden size by default."""
_REFUSED = (
    (re.compile(r"^is_encoder_decoder$|^(en|de)coder_(layers|ffn_dim|attention_heads)$"), "an encoder with a decoder"),
    (re.compile(r"^(mamba|ssm|conv_kernel|linear_(num|key|value|conv)|rwkv|lru_|time_mix"
                r"|state_size)"), "state-space or linear attention layers"),
    (re.compile(r"^(attn_layer_(period|offset|indices)|layers_block_type|block_types|_block_types|hybrid"
                r"|full_attention_interval|linear_attn_config|conv_L_cache"
                r"|attn_type_list)"), "layers without attention"),
    (re.compile(r"^(cross_attention_layers|cross_attn_every_n_layers|zero_expert_num|block_configs|ffn_multipliers"
                r"|num_query_heads|hidden_size_per_layer_input|vocab_size_per_layer_input|num_kv_shared_layers"
                r"|global_head_dim|attention_k_eq_v|index_topk|index_n_heads"
                r"|compress_ratios)$"), "layers of different sizes or kinds"),
)  # fmt: skip
"""Keys of models whose bytes do not follow from one layer's sizes, and their kind of layers."""
_ENCODERS = {
    "bert", "roberta", "t5", "bart", "whisper", "vit", "clip", "electra", "deberta", "deberta-v2", "distilbert",
    "albert", "xlm-roberta", "mt5", "umt5", "marian", "pegasus",
}  # fmt: skip
_OTHER_LAYERS = {
    "longcat_flash", "openelm", "rwkv", "xlstm", "recurrent_gemma", "mllama", "mllama_text_model", "moshi",
    "zamba", "zamba2", "zaya", "lfm2", "lfm2_moe", "bamba", "mamba", "mamba2", "falcon_mamba", "falcon_h1",
    "kimi_linear", "minimax", "minimax_m1", "minimax_text_01", "olmo_hybrid", "nemotron_h", "jamba",
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "granitemoehybrid", "gemma3n", "gemma3n_text",
    "gemma4", "gemma4_text", "jetmoe", "diffllama", "deepseek_v4", "phi4flash", "plamo2", "hgrn", "retnet",
}  # fmt: skip
"""Families with state-space, recurrent, linear or cross attention, or with layers of several sizes."""
_HARMLESS = re.compile(
    r"^(architectures|auto_map|model_type|transformers_version|torch_dtype|dtype|use_cache|_.*|.*_token_id"
    r"|.*_token_index|.*_tokens?_ids?|rope.*|.*rope.*|rotary.*|partial_rotary_factor"
    r"|.*dropout.*|.*_pdrop|initializer.*|init_.*|.*_init.*|.*eps(ilon)?|.*epsilon|hidden_act.*|.*activation.*"
    r"|act_fn|.*_coef|.*softcap.*|.*_multiplier|output_.*|router_.*|.*scaling.*|logits?_.*"
    r"|norm_topk_prob|scoring_func|seq_aux|topk_(group|method)|n_group|num_expert_group|pretraining_tp"
    r"|.*position_embedding.*|max_position_embeddings|query_pre_attn_scalar|task_specific_params|id2label|label2id"
    r"|problem_type|summary_.*"
    r"|.*attn_implementation|attention_implementation|alibi.*|seq_length|clip_qkv|emb_.*|tokenizer.*|scale_.*"
    r"|reorder.*|residual_.*|apply_.*|slow_but_exact|prefix|temperature|top_[pk]|do_sample|bos.*|eos.*|pad.*|unk.*"
    r"|use_flash.*|use_cache.*|quantization_config|ep_size|aux_loss.*|swiglu_limit|initial_context_length"
    r"|experts_per_token|n_ctx|max_seq_len|n_positions|layer_norm.*|norm_type|normalization.*|mlp_type"
    r"|gradient_checkpointing|chunk_size_feed_forward"
    r"|.*_loss.*|return_dict.*|is_decoder|tie_encoder_decoder|torchscript|language|license|model_max_length"
    r"|no_rope.*|attn_temperature.*|floor_scale|attn_scale|use_bfloat16|original_.*|for_llm.*|.*version|rmsnorm"
    r"|multiplicative.*|verbose|logit_scale"
    r"|tensor_parallel.*|sequence_parallel|bidirectional|.*image_.*|.*vision_.*|.*video_.*|.*audio_.*|mm_.*|boi.*"
    r"|eoi.*|base_model.*|name_or_path|dim_model_base|scale_depth|onnx.*|fp16|bf16|fp32|softmax.*|use_dynamic_ntk"
    r"|use_logn_attn|no_bias|rms_norm|post_layer_norm|max_length|min_length"
    r"|attn_config|ffn_config|cla_share_factor|use_mrope|use_parallel_residual|parallel_residual|alpha|layer_type"
    r"|moe_(aux|z|router|use_aux|use_hard|dropout|capacity|gate|group|norm).*|expert_capacity.*|router.*"
    r"|position_.*|num_labels|attention_probs.*|nope_layer_interval|sep_token.*|decoder_start.*|forced.*"
    r"|num_beams.*|repetition.*|length_penalty|bad_words.*|diversity.*|early_stopping|encoder_no.*|exponential.*"
    r"|no_repeat.*|remove_invalid.*|suppress.*|typical_p|finetuning_task|pruned_heads|cross_attention_hidden_size"
    r"|add_cross_attention|offset_alibi|embedding_fraction|learned_pos_emb|cache_implementation"
    r"|sliding_window_size|max_attn_value|swiglu_alpha|z_loss_weight|.*_multiplier_scale)$"
)
_OTHER_PARTS = (
    "vision_config",
    "audio_config",
    "vision_tower_config",
    "speech_config",
    "talker_config",
    "visual",
    "code2wav_config",
)
_WINDOWED_TYPES = {"sliding_attention", "chunked_attention", "local", "sliding"}
_FULL_TYPES = {"full_attention", "global", "attention", "full"}


def read_shape(path: Path) -> DecoderShape:
    """Read a Hugging Face folder, or its `config.json`.

    Raises InvalidRequest if it is absent, CheckpointError naming a key that cannot be planned.
    """
    file = path if path.name == "config.json" else path / "config.json"
    if not file.is_file():
        fix = "give a folder in Hugging Face's layout, or --parameters and --flops"
        raise InvalidRequest("MODEL", f"{path} has no config.json", fix)
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a readable config ({error})") from error
    try:
        return shape_from_config(raw, file.parent.resolve().name)
    except UnplannedConfig as error:
        raise CheckpointError(f"{file}: {error}") from error


def shape_from(
    path: Path | None, parameters: float | None, flops: float | None, activation_bytes: float | None = None
) -> Shape:
    """Return the shape of a folder, or of another model by its sizes. Raises InvalidRequest unless one is given."""
    sizes = {"--parameters": parameters, "--flops": flops, "--activation-mb": activation_bytes}
    if path is not None:
        for option, value in sizes.items():
            if value is not None:
                field = option if option == "--activation-mb" else "MODEL"
                raise InvalidRequest(field, f"{path} is given together with {option}", "give a folder, or sizes")
        return read_shape(path)
    if parameters is not None and flops is not None:
        return plain_shape(parameters, flops, activation_bytes)
    problem, fix = (
        "is missing, and so are --parameters with --flops",
        "give a folder with a config.json, or both options",
    )
    raise InvalidRequest("MODEL", problem, fix)


def shape_from_config(raw: object, name: str) -> DecoderShape:
    """Return the shape of a parsed `config.json`. Raises UnplannedConfig naming the key."""
    if not isinstance(raw, dict):
        raise UnplannedConfig("must be an object; give a config.json of Hugging Face's layout")
    config = _Config(*_text_part(raw))
    _refuse(config.raw)
    shape = _shape(config, name)
    layers = {"dense": config.dense_layers, "experts": config.expert_layers}
    quantization = config.raw.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise UnplannedConfig(f"quantization_config: {_shown(quantization)} is not an object")
    storage = storage_of(shape, number_bytes_of(config.raw), quantization, layers)
    return replace(shape, storage=storage, notes=tuple(_notes(config, shape, quantization)))


_UNKNOWN = replace(FAMILIES["llama"], window="all")


class _Config:
    """The keys of a decoder's config, with its family's defaults, and a record of the keys read."""

    def __init__(self, raw: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        self.raw, self.outer = raw, outer
        self.model_type = str(raw.get("model_type", "llama"))[:_MAX_SHOWN]
        self.family_name = SAME_AS.get(self.model_type, self.model_type)
        self.family = FAMILIES.get(self.family_name, _UNKNOWN)
        self.defaults = defaults_of(self.family_name)
        self.read: set[str] = {"num_kv_heads", "num_key_value_heads", "use_qk_norm"}
        self.assumed: dict[str, Any] = {}
        self.dense_layers: Sequence[int] = ()
        self.expert_layers: Sequence[int] = ()

    def value(self, key: str) -> Any:
        """Return a key's value, the family's default if it is absent."""
        self.read.add(key)
        value = self.raw.get(key)
        return self.defaults.get(key) if key not in self.raw else value

    def whole(self, size: str, default: int | None = None, least: int = 1) -> int | None:
        """Return a size by the first of its names that is set, or the default. Raises UnplannedConfig."""
        names = _SIZES.get(size, (size,))
        given = [name for name in names if self.raw.get(name) is not None]
        self.read.update(names)
        values = {name: _whole(name, self.raw[name], least) for name in given}
        if len(set(values.values())) > 1 and size in _EXACT:
            raise UnplannedConfig(
                f"{', '.join(f'{key} {value:,}' for key, value in values.items())}: contradict each other; keep "
                "one of them"
            )
        if given:
            return values[given[0]]
        for name in names:
            if self.defaults.get(name) is not None and name not in self.raw:
                self.assumed[name] = self.defaults[name]
                return int(self.defaults[name])
        return default

    def needed(self, size: str) -> int:
        """Return a size without a default. Raises UnplannedConfig naming the key."""
        value = self.whole(size)
        if value is None:
            raise UnplannedConfig(
                f"{_SIZES.get(size, (size,))[0]}: is missing; give it, or plan with --parameters and --flops"
            )
        return value

    def flag(self, key: Flag) -> bool:
        """Return a fixed answer, or a key's value. Raises UnplannedConfig naming the key."""
        if isinstance(key, bool):
            return key
        value = self.value(key)
        if value is None:
            return False
        if not isinstance(value, bool | int):
            raise UnplannedConfig(f"{key}: {_shown(value)} is neither true nor false")
        return bool(value)


_EXACT = {"hidden_size", "num_hidden_layers", "num_attention_heads"}


def _text_part(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a multimodal model's decoder config, with keys taken from the outer config, and the outer config."""
    key = next((key for key in _TEXT_CONFIGS if isinstance(raw.get(key), dict)), None)
    if key is None or any(isinstance(raw.get(name), int) for name in _SIZES["hidden_size"]):
        return raw, raw
    inner, outer = _text_part(raw[key]) if key == "thinker_config" else (raw[key], raw)
    kept = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings")
    family = {"model_type": SAME_AS.get(str(raw.get("model_type")), raw.get("model_type", "llama"))}
    return family | {name: raw[name] for name in kept if name in raw} | inner, outer


def _refuse(raw: Mapping[str, Any]) -> None:
    """Reject models whose bytes do not follow from the sizes of a decoder's layer. Raises UnplannedConfig."""
    way = "plan it with --parameters and --flops"
    family = str(raw.get("model_type"))
    if family in _ENCODERS:
        raise UnplannedConfig(f"model_type: {family!r} is not a decoder; {way}")
    if family in _OTHER_LAYERS:
        raise UnplannedConfig(f"model_type: {family!r} has layers that are not planned from a config; {way}")
    for key, value in raw.items():
        problem = next((problem for pattern, problem in _REFUSED if pattern.match(key)), None)
        if problem and value not in (None, False, 0, [], {}):
            raise UnplannedConfig(f"{key}: models with {problem} are not planned from their config; {way}")


def _shape(config: _Config, name: str) -> DecoderShape:
    family = _family(config)
    layers = config.needed("num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise UnplannedConfig(f"num_hidden_layers: {layers:,} exceeds {_MAX_LAYERS:,}")
    hidden, heads = config.needed("hidden_size"), config.needed("num_attention_heads")
    head_dim, kv_heads = _head_dim(config, hidden, heads), _kv_heads(config, heads)
    ffn = _ffn_size(config, hidden)
    shape = DecoderShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        ffn_matrices=3 if family.is_gated else 2,
        vocab_size=config.needed("vocab_size"),
        is_tied=config.flag("tie_word_embeddings"),
        num_positions=0 if family.positions is None else config.needed("positions") + family.positions,
        has_qk_norm=_normalises_heads(config, family),
        windows=tuple(_windows(config, family, layers)),
        latent=_latent(config),
        experts=_experts(config, family, hidden, ffn, layers),
    )
    _refuse_other_widths(config, shape)
    vectors, other = _vectors(config, family, shape)
    return replace(shape, vector_numbers=vectors, other_parameters=other)


def _family(config: _Config) -> LayerFamily:
    """Return the family's row, changed by the keys that change its norms."""
    family = config.family
    if config.family_name == "falcon":
        new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn")
        two = config.whole("num_ln_in_parallel_attn", 2) == 2 if new else not parallel
        return replace(family, norms=2 if two else 1)
    if config.family_name == "stablelm" and config.flag("use_parallel_residual"):
        return replace(family, norms=1)
    if config.family_name == "opt":
        has_weights = config.flag("layer_norm_elementwise_affine")
        return replace(
            family,
            has_final_norm=config.flag("do_layer_norm_before"),
            norm_weight=has_weights,
            norm_bias=has_weights,
        )
    return family


def _normalises_heads(config: _Config, family: LayerFamily) -> bool:
    return bool(family.qk_norm) and (not family.qk_norm_key or config.flag(family.qk_norm_key))


def _head_dim(config: _Config, hidden: int, heads: int) -> int:
    given = config.whole("head_dim")
    return given or max(hidden // heads, 1)


def _kv_heads(config: _Config, heads: int) -> int:
    nested = config.raw.get("attn_config")
    config.read.update(("multi_query", "multi_query_attention", "multi_query_group_num"))
    if isinstance(nested, Mapping) and nested.get("kv_n_heads") is not None:
        given: int | None = _whole("attn_config.kv_n_heads", nested["kv_n_heads"])
    elif config.family_name == "falcon":
        is_new = config.flag("new_decoder_architecture")
        given = config.whole("num_key_value_heads", heads) if is_new else (1 if config.flag("multi_query") else heads)
    elif config.raw.get("multi_query_attention"):
        given = config.whole("multi_query_group_num", 1)
    elif config.family_name == "gpt_bigcode":
        given = 1 if config.flag("multi_query") else heads
    else:
        given = config.whole("num_key_value_heads", heads)
    kv_heads = given or heads
    if heads % kv_heads:
        raise UnplannedConfig(
            f"num_key_value_heads: {kv_heads:,} do not divide num_attention_heads {heads:,}; give a divisor"
        )
    return kv_heads


def _ffn_size(config: _Config, hidden: int) -> int:
    nested = config.raw.get("ffn_config")
    if config.family_name == "llama4_text":
        return config.needed("intermediate_size_mlp")
    if config.family_name == "mpt":
        ratio = config.value("expansion_ratio")
        return _whole("expansion_ratio", ratio) * hidden
    if isinstance(nested, Mapping) and nested.get("ffn_hidden_size") is not None:
        return _whole("ffn_config.ffn_hidden_size", nested["ffn_hidden_size"])
    size = config.whole("intermediate_size", 4 * hidden if config.family_name in _FOUR_TIMES else None)
    if size is None:
        size = config.needed("intermediate_size")
    return size // 2 if config.family_name == "qwen" else size


def _latent(config: _Config) -> Latent | None:
    rank = config.whole("kv_lora_rank")
    if rank is None:
        return None
    rope, nope = config.needed("qk_rope_head_dim"), config.needed("qk_nope_head_dim")
    config.read.update(("qk_head_dim", "head_dim"))
    hidden, heads = config.needed("hidden_size"), config.needed("num_attention_heads")
    queries = config.whole("q_lora_rank", 0) if config.raw.get("q_lora_rank", 0) is not None else 0
    value = config.whole("v_head_dim", max(hidden // heads, 1)) or 1
    return Latent(kv_rank=rank, q_rank=queries or 0, rope_dim=rope, nope_dim=nope, value_dim=value)


def _experts(config: _Config, family: LayerFamily, hidden: int, ffn: int, layers: int) -> Experts | None:
    """Return the mixture of experts, and record which layers have it."""
    nested = config.raw.get("ffn_config")
    num = config.whole("experts", least=0)
    per_token = config.whole("experts_per_token", least=0)
    if isinstance(nested, Mapping) and nested.get("moe_num_experts") is not None:
        num = _whole("ffn_config.moe_num_experts", nested["moe_num_experts"])
        per_token = _whole("ffn_config.moe_top_k", nested.get("moe_top_k", 1))
    with_experts = list(_expert_layers(config, layers)) if num else []
    config.expert_layers = with_experts
    config.dense_layers = [layer for layer in range(layers) if layer not in set(with_experts)]
    if not num or not with_experts:
        return None
    if not per_token or per_token > num:
        raise UnplannedConfig(f"num_experts_per_tok: {per_token or 'is missing'}; give a number from 1 to {num:,}")
    size = config.whole("intermediate_size" if config.family_name == "llama4_text" else "expert_size", ffn) or ffn
    shared = config.whole("shared_expert_intermediate_size", least=0)
    if shared is None:
        shared = (config.whole("shared_experts", family.shared_experts, least=0) or 0) * size
    router = num * hidden + (hidden if family.has_shared_gate else 0)
    return Experts(
        num=num,
        per_token=per_token,
        ffn_size=size,
        num_layers=len(with_experts),
        shared_size=shared,
        router_numbers=router,
        ffn_matrices=3 if family.is_gated else 2,
    )


def _expert_layers(config: _Config, layers: int) -> Iterator[int]:
    types = config.value("mlp_layer_types")
    listed = config.value("moe_layers")
    dense = set(_layer_list(config, "mlp_only_layers"))
    first = config.whole("first_k_dense_replace", 0, least=0) or 0
    start = config.whole("moe_layer_start_index", 0, least=0) or 0
    end = config.value("moe_layer_end_index")
    frequency = config.value("moe_layer_freq")
    steps = [
        config.whole(key, 1) or 1 for key in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    ]
    last = end if isinstance(end, int) and not isinstance(end, bool) and end >= 0 else layers - 1
    for layer in range(layers):
        if isinstance(types, list) and len(types) == layers:
            if types[layer] != "dense":
                yield layer
            continue
        if isinstance(listed, list) and listed:
            if layer in listed:
                yield layer
            continue
        if isinstance(frequency, list) and len(frequency) == layers:
            is_on = bool(frequency[layer])
        else:
            is_on = layer % (_whole("moe_layer_freq", frequency) if frequency is not None else 1) == 0
        if (
            is_on
            and max(first, start) <= layer <= last
            and layer not in dense
            and not any((layer + 1) % step for step in steps)
        ):
            yield layer


def _layer_list(config: _Config, key: str) -> list[int]:
    value = config.value(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise UnplannedConfig(f"{key}: {_shown(value)} is not a list of layers")
    return value


def _windows(config: _Config, family: LayerFamily, layers: int) -> Iterator[int]:
    """Yield the sliding window of each layer that has one. Raises UnplannedConfig naming the key."""
    sinks = config.whole("attention_sinks", 0, least=0) or 0
    config.read.update(
        ("attention_layers", "attention_types", "use_sliding_window", "sliding_window_pattern", "max_window_layers")
    )
    size = _window_size(config, family)
    types = _layer_types(config, layers)
    if types is not None:
        windowed = sum(kind in _WINDOWED_TYPES for kind in types)
        if windowed and size is None:
            raise UnplannedConfig("layer_types: asks for sliding_attention, and sliding_window is not set; set it")
    elif size is None:
        windowed = 0
    else:
        windowed = _num_windowed(config, family, layers)
    yield from [(size or 0) + sinks] * windowed


def _window_size(config: _Config, family: LayerFamily) -> int | None:
    if config.raw.get("use_sliding_window") is False:
        config.read.add("sliding_window")
        return None
    chunk = config.whole("attention_chunk_size") if config.family_name == "llama4_text" else None
    local = config.whole("window_size") if config.family_name == "gpt_neo" else None
    is_listed = config.raw.get("layer_types") is not None
    if family.window == "never" and not is_listed:
        return local
    value = config.value("sliding_window")
    if value is None or value is False or value == 0:
        return chunk
    if family.window == "late" and not config.flag("use_sliding_window") and not is_listed:
        return None
    return _whole("sliding_window", value)


def _num_windowed(config: _Config, family: LayerFamily, layers: int) -> int:
    """Return how many layers have the window, if no key lists them."""
    if family.window == "late":
        first = config.whole("max_window_layers", 0 if config.family_name == "qwen3_moe" else 28, least=0) or 0
        return max(0, layers - first)
    pattern = config.value("sliding_window_pattern")
    period = family.window_period if pattern is None else pattern
    if isinstance(period, str) and re.fullmatch("[LG]{1,64}", period):
        return sum(period[layer % len(period)] == "L" for layer in range(layers))
    if family.window == "period" or pattern is not None:
        every = _whole("sliding_window_pattern", period)
        return sum((layer + 1) % every != 0 for layer in range(layers))
    return layers


def _layer_types(config: _Config, layers: int) -> list[str] | None:
    """Return each layer's kind of attention if a key lists them. Raises UnplannedConfig naming the key."""
    key = next((key for key in ("layer_types", "attention_layers") if config.value(key) is not None), None)
    if key is None:
        return _neo_types(config, layers)
    types = config.value(key)
    if not isinstance(types, list) or len(types) < layers:
        raise UnplannedConfig(f"{key}: {_shown(types)} does not name a kind for each of {layers} layers")
    for kind in types:
        if not isinstance(kind, str) or kind not in _WINDOWED_TYPES | _FULL_TYPES:
            raise UnplannedConfig(
                f"{key}: layers of kind {_shown(kind)} are not planned; plan with --parameters and --flops"
            )
    return types[:layers]


def _neo_types(config: _Config, layers: int) -> list[str] | None:
    """Return the kinds of GPT-Neo's `attention_types`, such as [[["global", "local"], 12]]."""
    groups = config.raw.get("attention_types")
    if config.family_name != "gpt_neo":
        return None
    if groups is None:
        return ["global" if layer % 2 == 0 else "local" for layer in range(layers)]
    try:
        types = [str(kind) for kinds, times in groups for _ in range(min(int(times), layers)) for kind in kinds]
    except (TypeError, ValueError) as error:
        raise UnplannedConfig(f"attention_types: {_shown(groups)} is not a list of kinds and times") from error
    if len(types) != layers:
        raise UnplannedConfig(f"attention_types: names {len(types)} layers of {layers}")
    return types


def _refuse_other_widths(config: _Config, shape: DecoderShape) -> None:
    projected = config.whole("word_embed_proj_dim", shape.hidden_size)
    if projected != shape.hidden_size:
        raise UnplannedConfig(
            f"word_embed_proj_dim: {projected:,} differs from hidden_size; plan with --parameters and --flops"
        )


def _vectors(config: _Config, family: LayerFamily, shape: DecoderShape) -> tuple[int, int]:
    """Return the biases and norms of every layer, and further parameters."""
    hidden, latent = shape.hidden_size, shape.latent
    norm = hidden * (family.norm_weight + config.flag(family.norm_bias))
    numbers = family.norms * norm + family.layer_numbers
    if latent is None:
        numbers += config.flag(family.qkv_bias) * (shape.query_width + 2 * shape.key_width)
    else:
        numbers += latent.q_rank + latent.kv_rank
        numbers += config.flag(family.qkv_bias) * (latent.q_rank + latent.kv_rank + latent.rope_dim)
    numbers += config.flag(family.out_bias) * hidden
    if shape.has_qk_norm:
        width = 2 * shape.head_dim if family.qk_norm == "head" else shape.query_width + shape.key_width
        numbers += width * (2 if family.qk_norm_bias else 1)
    numbers += shape.num_heads if family.has_sinks else 0
    other = norm * family.has_final_norm - hidden  # a final norm of `hidden_size` is counted
    other += norm if family.has_embedding_norm else 0
    other += shape.vocab_size if config.flag(family.head_bias) else 0
    if config.flag(family.mlp_bias):
        width = (shape.ffn_matrices - 1) * shape.ffn_size + hidden
        other += shape.num_dense_layers * width
    if (experts := shape.experts) is not None:
        width = (experts.ffn_matrices - 1) * experts.ffn_size + hidden
        other += experts.num_layers * experts.num * (width * family.has_expert_bias + family.has_router_bias)
        if config.flag(family.mlp_bias) and experts.shared_size:
            other += experts.num_layers * ((experts.ffn_matrices - 1) * experts.shared_size + hidden)
    return numbers, other


def _notes(config: _Config, shape: DecoderShape, quantization: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the parts that the plan omits, and assumptions."""
    yield from _family_notes(config, shape)
    if shape.experts is not None:
        experts = shape.experts
        yield (
            f"{experts.per_token} of {experts.num} experts a token in {experts.num_layers} of "
            f"{shape.num_layers} layers, with balanced routing and without expert parallelism"
        )
    if config.assumed:
        assumed = ", ".join(f"{key} {value}" for key, value in config.assumed.items())
        yield f"absent keys have the family's defaults: {assumed}"
    yield from _uncounted_notes(config, shape)
    if quantization is not None:
        if quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo"):
            yield "quantization_config asks for a quantised KV cache: --kv decides the plan's"
        yield "a training is planned with unquantised weights"
    yield from _unread_notes(config)


def _family_notes(config: _Config, shape: DecoderShape) -> Iterator[str]:
    if config.family_name not in FAMILIES:
        yield (
            f"model_type {config.model_type!r} is not in the planner's table: planned by its sizes as a "
            "Llama-like decoder, biases and norms may differ"
        )
    elif config.model_type not in SERVED:
        yield (
            f"this engine does not serve {config.model_type}, and this trainer does not train it: planned by its shape"
        )
    if config.model_type in SERVED and 0 < len(shape.windows) < shape.num_layers:
        yield (
            "this engine frees keys behind a window only where every layer has one: it would hold every token "
            "of all layers"
        )


def _uncounted_notes(config: _Config, shape: DecoderShape) -> Iterator[str]:
    """Yield layers for further tokens (multi-token prediction), and parts other than the text decoder."""
    num_layers = config.raw.get("num_nextn_predict_layers")
    config.read.add("num_nextn_predict_layers")
    if type(num_layers) is int and num_layers > 0:
        gigabytes = num_layers * (shape.weight_bytes - 2 * shape.table_parameters * 2) / shape.num_layers / 1e9
        yield (
            f"num_nextn_predict_layers {num_layers}: the layers that predict further tokens, about {gigabytes:.1f} GB, "
            "are not loaded for plain decoding and not counted"
        )
    if parts := [key for key in _OTHER_PARTS if config.outer.get(key)]:
        yield f"{', '.join(parts)}: not counted, the plan is of the text decoder"


def _unread_notes(config: _Config) -> Iterator[str]:
    unread = sorted(
        key
        for key, value in config.raw.items()
        if key not in config.read and not _HARMLESS.match(key) and value not in (None, False, [], {}, "")
    )
    if unread:
        shown = ", ".join(key[:_MAX_SHOWN] for key in unread[:20])
        more = f" and {len(unread) - 20} more" if len(unread) > 20 else ""
        yield (
            f"keys that the planner does not read: {shown}{more}; the plan is wrong if they change weights or attention"
        )


def _whole(key: str, value: Any, least: int = 1) -> int:
    """Return a whole number within the bounds of a model. Raises UnplannedConfig naming the key."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= _MAX_SIZE or int(value) != value:
        kind = "; layers of different sizes are not planned" if isinstance(value, list) else ""
        raise UnplannedConfig(f"{key}: {_shown(value)} is not a whole number from {least} to {_MAX_SIZE:,}{kind}")
    return int(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
