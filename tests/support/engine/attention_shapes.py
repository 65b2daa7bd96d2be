"""Decoder shapes for tests."""

from typing import Any

from models.decoder.config import DecoderConfig


def attention_shape(heads: int, kv_heads: int, head_dim: int, layers: int = 2, **others: Any) -> DecoderConfig:
    """Return a config with these heads; the other sizes are arbitrary unless they are given."""
    sizes = {"vocab_size": 2, "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 8}
    return DecoderConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        **sizes | others,
    )
