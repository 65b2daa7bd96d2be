"""Bytes of a checkpoint's weights by its `quantization_config`: quantised modules and bytes per weight. Pure.

A method's row gives bits, groups and scales; patterns of excluded modules are matched with the module names of
transformers.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from pipelines.planner.shapes import DecoderShape, WeightStorage


class UnplannedConfig(ValueError):
    """A config that the planner cannot plan; the message names the key."""


Raw = Mapping[str, Any]
_KINDS = ("attention", "ffn", "experts", "shared", "router", "embedding", "head", "vectors")
_SKIP_KEYS = (
    *("modules_to_not_convert", "ignore", "llm_int8_skip_modules", "skip_modules"),
    *("exclude", "exclude_modules", "ignored_layers"),
)
"""Keys that list unquantised modules."""
_MAX_PATTERNS = 20_000
_DTYPES = {
    "float64": 8.0,
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "float": 4.0,
    "half": 2.0,
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a quantised matrix is stored: bits of a weight, and the bytes of its scales.

    A scale is shared by `group` weights of a row (0: by the whole row), or by `block` rows and columns; a whole matrix
    has one if `is_single`.
    """

    bits: float
    group: int = 0
    block: tuple[int, int] | None = None
    is_single: bool = False
    scale_bytes: float = 2.0
    column_bytes: float = 0.0
    """Bytes of a column in addition to the scales, such as GPTQ's index of groups."""

    def bytes_of(self, rows: int, columns: int) -> float:
        """Return the bytes of a matrix of `rows` outputs and `columns` inputs."""
        if self.is_single:
            scales = 1.0
        elif self.block is not None:
            scales = -(-rows // self.block[0]) * -(-columns // self.block[1])
        else:
            scales = rows * (-(-columns // self.group) if self.group else 1)
        return rows * columns * self.bits / 8 + scales * self.scale_bytes + columns * self.column_bytes


@dataclass(frozen=True, slots=True)
class _Module:
    """A matrix of one layer, or of all (`layer` is None), under its names in the families."""

    kind: str
    names: tuple[str, ...]
    layer: int | None
    rows: int
    columns: int


_NAMES = {
    "query": (
        "self_attn.q_proj",
        "self_attn.qkv_proj",
        "attn.c_attn",
        "attention.query_key_value",
        "self_attention.query_key_value",
        "attn.Wqkv",
        "attention.wqkv",
        "self_attn.q_b_proj",
    ),
    "key": ("self_attn.k_proj", "self_attn.kv_a_proj_with_mqa"),
    "value": ("self_attn.v_proj", "self_attn.kv_b_proj"),
    "out": (
        "self_attn.o_proj",
        "attn.c_proj",
        "attention.dense",
        "self_attention.dense",
        "attn.out_proj",
        "self_attn.dense",
        "attention.wo",
    ),
    "gate": ("mlp.gate_proj", "mlp.gate_up_proj", "feed_forward.w1", "feed_forward.gate_proj"),
    "up": ("mlp.up_proj", "mlp.c_fc", "mlp.fc1", "mlp.dense_h_to_4h", "feed_forward.w3", "feed_forward.up_proj"),
    "down": (
        "mlp.down_proj",
        "mlp.c_proj",
        "mlp.fc2",
        "mlp.dense_4h_to_h",
        "feed_forward.w2",
        "feed_forward.down_proj",
    ),
    "router": ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "feed_forward.router", "block_sparse_moe.router"),
}
_EXPERTS = (
    "mlp.experts.0.{}_proj",
    "mlp.experts.{}_proj",
    "block_sparse_moe.experts.0.{}",
    "feed_forward.experts.{}_proj",
)
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_SHARED = ("mlp.shared_experts.{}_proj", "mlp.shared_expert.{}_proj", "feed_forward.shared_expert.{}_proj")
_HEADS = ("lm_head", "embed_out", "output", "language_model.lm_head", "transformer.output_layer")
_EMBEDDINGS = ("model.embed_tokens", "embed_tokens", "transformer.wte", "model.language_model.embed_tokens")
_PREFIXES = (
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "transformer.h.",
    "gpt_neox.layers.",
    "model.decoder.layers.",
    "layers.",
)


def number_bytes_of(raw: Raw) -> float:
    """Return the bytes of a number in the checkpoint's dtype, bfloat16 by default. Raises UnplannedConfig."""
    for key in ("dtype", "torch_dtype"):
        value = raw.get(key)
        if value is None or value == "auto":
            continue
        name = value.removeprefix("torch.") if isinstance(value, str) else ""
        if name not in _DTYPES:
            raise UnplannedConfig(f"{key}: unknown dtype {str(value)[:40]!r}; known: {', '.join(_DTYPES)}")
        return _DTYPES[name]
    return 2.0


def storage_of(
    shape: DecoderShape, number_bytes: float, raw: Raw | None, layers_of: Mapping[str, Sequence[int]]
) -> WeightStorage:
    """Return the bytes of each kind of weight. `layers_of` names the layers with and without experts.

    Raises UnplannedConfig naming the key.
    """
    sizes: dict[str, Any] = dict.fromkeys(_KINDS, number_bytes)
    plain = WeightStorage(**sizes, kv=max(number_bytes, 2.0))
    if not raw:
        return plain
    method, rules, skipped = _read(raw)
    totals: dict[str, list[float]] = {}
    for module in _modules(shape, layers_of):
        stored_form = None if skipped(module) else next((form for matches, form in rules if matches(module)), None)
        weights = module.rows * module.columns
        size = weights * number_bytes if stored_form is None else stored_form.bytes_of(module.rows, module.columns)
        sums = totals.setdefault(module.kind, [0.0, 0.0])
        sums[0], sums[1] = sums[0] + size, sums[1] + weights
    means: dict[str, Any] = {kind: size / weights for kind, (size, weights) in totals.items() if weights}
    return replace(plain, **means, method=method)


Matches = Callable[[_Module], bool]


def _read(raw: Raw) -> tuple[str, list[tuple[Matches, Format]], Matches]:
    """Return the method in words, the formats of modules in the order of the rules, and whether a module is skipped."""
    method = str(raw.get("quant_method") or raw.get("quant_type") or ("bitsandbytes" if _is_bnb(raw) else "")).lower()
    method = method.replace("_", "-").removeprefix("quantizationmethod.")
    if method not in _METHODS:
        known = ", ".join(sorted(set(_METHODS)))
        raise UnplannedConfig(f"quantization_config.quant_method: unknown method {method[:40]!r}; known: {known}")
    rules = _METHODS[method](raw)
    patterns = [pattern for key in _SKIP_KEYS for pattern in _texts(raw, key)]
    if len(patterns) > _MAX_PATTERNS:
        raise UnplannedConfig(f"quantization_config: over {_MAX_PATTERNS:,} patterns of modules; give fewer")
    converts_tables = bool(raw.get("lm_head")), bool(raw.get("include_input_output_embeddings"))
    matches = matcher(tuple(patterns))
    names_head = any(module in {"lm_head", "re:.*lm_head", "*lm_head*"} for module in _texts(raw, "modules_to_convert"))

    def is_skipped(module: _Module) -> bool:
        if module.kind == "embedding":
            return not converts_tables[1]
        is_head_kept = module.kind == "head" and not (any(converts_tables) or names_head)
        if is_head_kept and (method in _SKIP_HEAD or not patterns):
            return True
        if module.kind == "router" and method in _SKIP_ROUTER:
            return True
        return matches(module.names)

    return method, rules, is_skipped


_SKIP_HEAD = {
    "gptq",
    "awq",
    "auto-round",
    "auto-awq",
    "mxfp4",
    "bitsandbytes",
    "fp8",
    "fbgemm-fp8",
    "hqq",
    "eetq",
    "torchao",
    "bitnet",
    "quanto",
}
"""Methods that do not convert the head by default."""
_SKIP_ROUTER = {"gptq", "awq", "mxfp4", "fp8", "auto-round"}
"""Methods whose checkpoints keep the router of experts in 16 bits."""


def _whole(raw: Raw, key: str, default: int | None, known: Sequence[int] = ()) -> int:
    value = raw.get(key, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (known and value not in known)
        or not -1 <= value <= 2**16
    ):
        expected = f"one of {', '.join(map(str, known))}" if known else "a whole number"
        raise UnplannedConfig(f"quantization_config.{key}: {str(value)[:40]!r} is not {expected}")
    return value


def _texts(raw: Raw, key: str) -> list[str]:
    value = raw.get(key)
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UnplannedConfig(f"quantization_config.{key}: {str(value)[:40]!r} is not a list of module names")
    return value


def _part(raw: Raw, key: str) -> Raw:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnplannedConfig(f"quantization_config.{key}: {str(value)[:40]!r} is not an object")
    return value


def _is_bnb(raw: Raw) -> bool:
    return bool(raw.get("load_in_4bit") or raw.get("load_in_8bit"))


def _everywhere(form: Format) -> list[tuple[Matches, Format]]:
    return [(lambda _module: True, form)]


def _fp8(raw: Raw) -> list[tuple[Matches, Format]]:
    block = raw.get("weight_block_size")
    if block is None:
        return _everywhere(Format(bits=8, is_single=True, scale_bytes=4))
    if not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and 0 < size <= 2**16 for size in block)
    ):
        raise UnplannedConfig(f"quantization_config.weight_block_size: {str(block)[:40]!r} is not two whole numbers")
    return _everywhere(Format(bits=8, block=(block[0], block[1]), scale_bytes=4))


def _bitsandbytes(raw: Raw) -> list[tuple[Matches, Format]]:
    if raw.get("load_in_4bit") or raw.get("_load_in_4bit"):
        scale = 1 + 4 / 256 if raw.get("bnb_4bit_use_double_quant") else 4
        return _everywhere(Format(bits=4, group=64, scale_bytes=scale))
    if raw.get("load_in_8bit") or raw.get("_load_in_8bit"):
        return _everywhere(Format(bits=8, scale_bytes=4))
    raise UnplannedConfig(
        "quantization_config: bitsandbytes has neither load_in_4bit nor load_in_8bit; set one of them"
    )


def _gptq(raw: Raw) -> list[tuple[Matches, Format]]:
    bits, group = _whole(raw, "bits", None, (2, 3, 4, 8)), _whole(raw, "group_size", 128)
    return _everywhere(Format(bits=bits, group=max(group, 0), scale_bytes=2 + bits / 8, column_bytes=4))


def _awq(raw: Raw) -> list[tuple[Matches, Format]]:
    bits = _whole(raw, "bits" if "bits" in raw else "w_bit", 4, (2, 3, 4, 8))
    group = _whole(raw, "group_size" if "group_size" in raw else "q_group_size", 128)
    return _everywhere(Format(bits=bits, group=max(group, 0), scale_bytes=2 + bits / 8))


def _compressed(raw: Raw) -> list[tuple[Matches, Format]]:
    groups = _part(raw, "config_groups")
    if not groups:
        raise UnplannedConfig(
            "quantization_config.config_groups: is missing or empty; give the groups of compressed-tensors"
        )
    return [_compressed_group(_part(groups, name)) for name in groups]


def _compressed_group(group: Raw) -> tuple[Matches, Format]:
    weights, targets = _part(group, "weights"), tuple(_texts(group, "targets") or ["Linear"])
    bits = _whole(weights, "num_bits", 8, (1, 2, 3, 4, 6, 8, 16)) if weights else 16
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    is_float = str(weights.get("type", "int")) == "float"
    zero = 0 if is_float or weights.get("symmetric", True) else bits / 8
    scale = (1.0 if is_float and bits == 4 else 2.0) + zero
    size = (
        _whole(weights, "group_size", 0 if weights.get("group_size", 0) is None else 128)
        if strategy in {"group", "tensor_group"}
        else 0
    )
    form = Format(bits=bits, group=max(size, 0), is_single=strategy == "tensor", scale_bytes=scale)
    if strategy == "block":
        form = replace(
            form, block=_fp8({"weight_block_size": weights.get("block_structure") or [128, 128]})[0][1].block
        )
    if bits == 16:
        form = Format(bits=16, is_single=True, scale_bytes=0)
    is_any, matches = "Linear" in targets, matcher(tuple(target for target in targets if target != "Linear"))
    return (lambda module: (is_any and module.kind != "embedding") or matches(module.names)), form


def _mxfp4(_raw: Raw) -> list[tuple[Matches, Format]]:
    return [(lambda module: module.kind == "experts", Format(bits=4, group=32, scale_bytes=1))]


def _hqq(raw: Raw) -> list[tuple[Matches, Format]]:
    config = _part(raw, "quant_config")
    weights = _part(config, "weight_quant_params") or config
    return _everywhere(
        Format(
            bits=_whole(weights, "nbits", 4, (1, 2, 3, 4, 8)), group=_whole(weights, "group_size", 64), scale_bytes=4
        )
    )


_TORCHAO = {
    "int4": Format(bits=4, group=128, scale_bytes=4),
    "int8": Format(bits=8),
    "float8": Format(bits=8, scale_bytes=4),
    "nvfp4": Format(bits=4, group=16, scale_bytes=1),
    "mxfp4": Format(bits=4, group=32, scale_bytes=1),
    "mxfp8": Format(bits=8, group=32, scale_bytes=1),
}


def _torchao(raw: Raw) -> list[tuple[Matches, Format]]:
    kind: Any = raw.get("quant_type")
    options: Raw = _part(raw, "quant_type_kwargs")
    while isinstance(kind, Mapping):  # {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}}
        data = kind.get("_data")
        options = data if isinstance(data, Mapping) else options
        kind = kind.get("_type") or kind.get("default")
    name = re.sub(r"[^a-z0-9]", "", str(kind).lower())
    match = next((form for start, form in _TORCHAO.items() if start in name), None)
    if match is None:
        raise UnplannedConfig(
            f"quantization_config.quant_type: unknown type {str(kind)[:40]!r}; known: {', '.join(_TORCHAO)}"
        )
    return _everywhere(replace(match, group=_whole(options, "group_size", match.group)) if match.bits == 4 else match)


_QUANTO = {"int8": 8, "float8": 8, "int4": 4, "int2": 2}


def _quanto(raw: Raw) -> list[tuple[Matches, Format]]:
    kind = raw.get("weights", "int8")
    if not isinstance(kind, str) or kind not in _QUANTO:
        raise UnplannedConfig(f"quantization_config.weights: {str(kind)[:40]!r} is none of {', '.join(_QUANTO)}")
    bits = _QUANTO[kind]
    return _everywhere(Format(bits=bits, group=0 if bits == 8 else 128, scale_bytes=2 if bits == 8 else 4))


_ALGORITHMS = {
    "FP8": Format(bits=8, is_single=True, scale_bytes=4),
    "FP8_PER_CHANNEL_PER_TOKEN": Format(bits=8, scale_bytes=4),
    "FP8_PB_WO": Format(bits=8, block=(128, 128), scale_bytes=4),
    "NVFP4": Format(bits=4, group=16, scale_bytes=1),
    "NVFP4_AWQ": Format(bits=4, group=16, scale_bytes=1),
    "W4A16_AWQ": Format(bits=4, group=128, scale_bytes=2),
    "W4A8_AWQ": Format(bits=4, group=128, scale_bytes=2),
    "W8A16": Format(bits=8),
    "INT8": Format(bits=8),
    "W8A8_SQ_PER_CHANNEL": Format(bits=8),
    "MXFP8": Format(bits=8, group=32, scale_bytes=1),
}


def _modelopt(raw: Raw) -> list[tuple[Matches, Format]]:
    if raw.get("config_groups"):
        return _compressed(raw)
    name = raw.get("quant_algo") or _part(raw, "quantization").get("quant_algo")
    if not isinstance(name, str) or name not in _ALGORITHMS:
        raise UnplannedConfig(f"quantization_config.quant_algo: {str(name)[:40]!r} is none of {', '.join(_ALGORITHMS)}")
    return _everywhere(_ALGORITHMS[name])


def _quark(raw: Raw) -> list[tuple[Matches, Format]]:
    weight = _part(_part(raw, "global_quant_config"), "weight")
    digits = re.search(r"(?:int|fp|float|mxfp|uint)(\d)", str(weight.get("dtype", "")))
    if digits is None or digits[1] not in "468":
        raise UnplannedConfig(
            f"quantization_config.global_quant_config.weight.dtype: unknown dtype {str(weight.get('dtype'))[:40]!r}"
        )
    group = weight.get("group_size")
    size = group if isinstance(group, int) and not isinstance(group, bool) and group > 0 else 0
    return _everywhere(Format(bits=int(digits[1]), group=size, scale_bytes=1 if size else 4))


_METHODS: Mapping[str, Callable[[Raw], list[tuple[Matches, Format]]]] = {
    "auto-round": _gptq,
    "intel/auto-round": _gptq,
    "awq": _awq,
    "bitnet": lambda _raw: _everywhere(Format(bits=2, is_single=True)),
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "eetq": lambda _raw: _everywhere(Format(bits=8)),
    "fbgemm-fp8": lambda _raw: _everywhere(Format(bits=8, scale_bytes=4)),
    "fp8": _fp8,
    "gptq": _gptq,
    "hqq": _hqq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "quanto": _quanto,
    "quark": _quark,
    "torchao": _torchao,
}


def matcher(patterns: tuple[str, ...]) -> Callable[[tuple[str, ...]], bool]:
    """Return whether one of a module's names matches a pattern.

    A pattern is `re:` and a regular expression, has wildcards, or is a sequence of a name's parts.
    """
    plain = {
        pattern.strip(".") for pattern in patterns if not (pattern.startswith(_EXPRESSIONS) or _WILD.search(pattern))
    }
    wild = [pattern for pattern in patterns if _WILD.search(pattern) and not pattern.startswith(_EXPRESSIONS)]
    expressions = [_expression(pattern[3:]) for pattern in patterns if pattern.startswith(_EXPRESSIONS)]

    @cache
    def matches(names: tuple[str, ...]) -> bool:
        return any(
            not plain.isdisjoint(_runs(name))
            or any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in wild)
            or any(expression.match(name) for expression in expressions)
            for name in names
        )

    return matches


_EXPRESSIONS, _WILD = ("re:", "-:"), re.compile(r"[*?\[]")


def _runs(name: str) -> Iterator[str]:
    """Yield every sequence of neighbouring parts of a dotted name."""
    parts = name.split(".")
    return (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))


def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnplannedConfig(f"quantization_config: bad regular expression {text[:40]!r} ({error})") from error


def _modules(shape: DecoderShape, layers_of: Mapping[str, Sequence[int]]) -> Iterator[_Module]:
    """Yield every matrix once; of a layer's experts only the first."""
    hidden, experts = shape.hidden_size, shape.experts
    for layer in range(shape.num_layers):
        for name, rows, columns in _attention(shape):
            yield _module("attention", layer, _NAMES[name], rows, columns)
    for layer in layers_of["dense"]:
        for name in ("gate", "up", "down")[3 - shape.ffn_matrices :]:
            yield _module("ffn", layer, _NAMES[name], *_turned(name, shape.ffn_size, hidden))
    for layer in layers_of["experts"] if experts else ():
        assert experts is not None
        for name in ("gate", "up", "down")[3 - experts.ffn_matrices :]:
            names = [text.format(_MIXTRAL[name] if "block_sparse" in text else name) for text in _EXPERTS]
            if name == "gate":
                names += ["mlp.experts.gate_up_proj"]
            yield _module("experts", layer, names, *_turned(name, experts.ffn_size, hidden))
            if experts.shared_size:
                shared = [text.format(name) for text in _SHARED]
                yield _module("shared", layer, shared, *_turned(name, experts.shared_size, hidden))
        yield _module("router", layer, _NAMES["router"], 1, max(experts.router_numbers, 1))
    yield _Module("embedding", _EMBEDDINGS, None, shape.vocab_size, hidden)
    if not shape.is_tied:
        yield _Module("head", _HEADS, None, shape.vocab_size, hidden)


def _module(kind: str, layer: int, names: Sequence[str], rows: int, columns: int) -> _Module:
    full = tuple(f"{prefix}{layer}.{name}" for prefix in _PREFIXES for name in names)
    return _Module(kind, full, layer, rows, columns)


def _turned(name: str, width: int, hidden: int) -> tuple[int, int]:
    return (hidden, width) if name == "down" else (width, hidden)


def _attention(shape: DecoderShape) -> Iterator[tuple[str, int, int]]:
    hidden, latent = shape.hidden_size, shape.latent
    if latent is None:
        yield "query", shape.query_width, hidden
        yield "key", shape.key_width, hidden
        yield "value", shape.key_width, hidden
        yield "out", hidden, shape.query_width
        return
    if latent.q_rank:
        yield "query", latent.q_rank, hidden
    yield "query", shape.query_width, latent.q_rank or hidden
    yield "key", latent.kv_rank + latent.rope_dim, hidden
    yield "value", shape.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank
    yield "out", hidden, shape.num_heads * latent.value_dim
