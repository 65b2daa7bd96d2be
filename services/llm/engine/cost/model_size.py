"""What counting a step's cost needs of a decoder: its shape, and the bytes of its numbers. Pure: no torch."""

from dataclasses import dataclass
from typing import Protocol

from models.decoder.window import Window
from services.llm.engine.config import KvKind, WeightKind


class Shape(Protocol):
    """What the count needs of a decoder's config."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def window(self) -> Window | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSizes:
    """Bytes of one number in the layers' matrices, in head and embedding, in a beam's tail; and of a token's keys and values in one layer."""

    matrix: float
    head: float
    tail: float
    kv_token_layer: float


def number_sizes(shape: Shape, number_bytes: int, kv_kind: KvKind, weight_kind: WeightKind = "model") -> NumberSizes:
    """Return the sizes of a decoder in a dtype of `number_bytes`. A KV cache of one byte has an fp32 scale per head.

    int8 is of the layers' matrices alone; their scales, one a row, are not counted.
    """
    head_bytes = shape.head_dim * number_bytes if kv_kind == "model" else shape.head_dim + 4
    return NumberSizes(
        matrix=1 if weight_kind == "int8" else number_bytes,
        head=number_bytes,
        tail=number_bytes,
        kv_token_layer=2 * shape.num_key_value_heads * head_bytes,
    )
