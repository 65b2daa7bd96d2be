"""A decoder's shape as a cache and attention see it: the rest is as small as may be and stands for nothing."""

from models.decoder.config import DecoderConfig


def attention_shape(heads: int, kv_heads: int, head_dim: int, layers: int = 2) -> DecoderConfig:
    """Return the shape of a decoder that is never built."""
    return DecoderConfig(
        vocab_size=2,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8,
    )
