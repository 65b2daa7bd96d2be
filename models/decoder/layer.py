"""The tensors of a decoder, one row each: names, shapes, and how they are stored and joined.

Pure: no torch, no weights. All code that handles weights reads these tables: the reference decoder (its modules), the
reader and writer of checkpoints (`checkpoint_names`), the GGUF converter (`gguf_modules`), the engine's joined weights
and the structs of its C++ library (`MATRICES`, `NORMS`), and its cost model (`num_matrix_weights`). A family with other
names, norms or biases needs rows or fields here; only new mathematics needs code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.decoder.config import DecoderConfig

Size = Callable[[DecoderConfig], int]
Flag = Callable[[DecoderConfig], bool]


def _always(_config: DecoderConfig) -> bool:
    return True


def _never(_config: DecoderConfig) -> bool:
    return False


def _hidden(config: DecoderConfig) -> int:
    return config.hidden_size


def _query_width(config: DecoderConfig) -> int:
    return config.num_attention_heads * config.head_dim


def _key_width(config: DecoderConfig) -> int:
    return config.num_key_value_heads * config.head_dim


def _ffn(config: DecoderConfig) -> int:
    return config.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """An RMS norm of a layer over `size` numbers.

    `checkpoint` is the module's name within a layer of a Hugging Face checkpoint, `gguf` within a block of a GGUF file.
    """

    name: str
    checkpoint: str
    gguf: str
    size: Size
    is_present: Flag = _always


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A matrix (`rows`, `columns`) of a layer, (out, in) as in torch's linear, with a bias if the family has one.

    The engine joins all projections of the same `matrix`, in this order, along their rows; the joined matrix is
    quantised or packed. `rope_heads` is the config key of the number of heads, in projections whose heads get rope.
    """

    name: str
    checkpoint: str
    gguf: str
    rows: Size
    columns: Size
    matrix: str
    has_bias: Flag = _never
    rope_heads: str | None = None


LAYER: tuple[Norm | Projection, ...] = (
    Norm(name="attention_norm", checkpoint="input_layernorm", gguf="attn_norm", size=_hidden),
    Projection(
        name="q",
        checkpoint="self_attn.q_proj",
        gguf="attn_q",
        rows=_query_width,
        columns=_hidden,
        matrix="qkv",
        has_bias=lambda config: config.qkv_bias,
        rope_heads="num_attention_heads",
    ),
    Projection(
        name="k",
        checkpoint="self_attn.k_proj",
        gguf="attn_k",
        rows=_key_width,
        columns=_hidden,
        matrix="qkv",
        has_bias=lambda config: config.qkv_bias,
        rope_heads="num_key_value_heads",
    ),
    Projection(
        name="v",
        checkpoint="self_attn.v_proj",
        gguf="attn_v",
        rows=_key_width,
        columns=_hidden,
        matrix="qkv",
        has_bias=lambda config: config.qkv_bias,
    ),
    Projection(
        name="output",
        checkpoint="self_attn.o_proj",
        gguf="attn_output",
        rows=_hidden,
        columns=_query_width,
        matrix="output",
        has_bias=lambda config: config.output_bias,
    ),
    Norm(
        name="query_norm",
        checkpoint="self_attn.q_norm",
        gguf="attn_q_norm",
        size=lambda config: config.head_dim,
        is_present=lambda config: config.qk_norm,
    ),
    Norm(
        name="key_norm",
        checkpoint="self_attn.k_norm",
        gguf="attn_k_norm",
        size=lambda config: config.head_dim,
        is_present=lambda config: config.qk_norm,
    ),
    Norm(name="ffn_norm", checkpoint="post_attention_layernorm", gguf="ffn_norm", size=_hidden),
    Projection(
        name="gate",
        checkpoint="mlp.gate_proj",
        gguf="ffn_gate",
        rows=_ffn,
        columns=_hidden,
        matrix="gate_up",
        has_bias=lambda config: config.mlp_bias,
    ),
    Projection(
        name="up",
        checkpoint="mlp.up_proj",
        gguf="ffn_up",
        rows=_ffn,
        columns=_hidden,
        matrix="gate_up",
        has_bias=lambda config: config.mlp_bias,
    ),
    Projection(
        name="down",
        checkpoint="mlp.down_proj",
        gguf="ffn_down",
        rows=_hidden,
        columns=_ffn,
        matrix="down",
        has_bias=lambda config: config.mlp_bias,
    ),
)
"""The modules of a layer, in the order of Hugging Face checkpoints."""

LAYER_PREFIX = "model.layers.{}."
"""Prefix of a layer's module names in a Hugging Face checkpoint."""

OUTSIDE_LAYERS = {
    "embedding": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}
"""The modules outside the layers: their names in a Hugging Face checkpoint and in GGUF. A tied decoder has no
`head`."""

NORMS = tuple(row.name for row in LAYER if isinstance(row, Norm))
"""The norms of a layer, in the order of the C++ library's `TailraceLayer`."""

MATRICES = {
    matrix: tuple(row for row in LAYER if isinstance(row, Projection) and row.matrix == matrix)
    for matrix in dict.fromkeys(row.matrix for row in LAYER if isinstance(row, Projection))
}
"""The joined matrices of a layer and their projections, in the order of the C++ library's `TailraceLayer`."""


def rows_of(config: DecoderConfig) -> Iterator[Norm | Projection]:
    """Return the modules that a layer of this decoder has."""
    return (row for row in LAYER if isinstance(row, Projection) or row.is_present(config))


def checkpoint_names(config: DecoderConfig) -> dict[str, str]:
    """Map the name of each module of a decoder (`layers.0.q`) to its name in a Hugging Face checkpoint."""
    names = {name: checkpoint for name, (checkpoint, _) in OUTSIDE_LAYERS.items()}
    if config.tie_word_embeddings:
        del names["head"]
    for layer in range(config.num_hidden_layers):
        names |= {f"layers.{layer}.{row.name}": LAYER_PREFIX.format(layer) + row.checkpoint for row in rows_of(config)}
    return names


def num_matrix_weights(config: DecoderConfig) -> int:
    """Return the number of weights in the matrices of all layers."""
    sizes = (row.rows(config) * row.columns(config) for row in LAYER if isinstance(row, Projection))
    return config.num_hidden_layers * sum(sizes)
