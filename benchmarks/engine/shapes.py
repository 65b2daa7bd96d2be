"""Decoders with random weights in the shapes of known models, for figures that depend on size only. Needs torch."""

from dataclasses import replace

import torch

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.rope_config import Rope

_QWEN3 = DecoderConfig(
    vocab_size=151_936,
    hidden_size=1_024,
    intermediate_size=3_072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rope=Rope(1_000_000.0),
    rms_norm_eps=1e-6,
    qk_norm=True,
)
SHAPES = {
    "qwen3-0.6b": _QWEN3,
    "qwen3-1.7b": replace(_QWEN3, hidden_size=2_048, intermediate_size=6_144),
    "onerec-1.7b": replace(_QWEN3, hidden_size=2_048, intermediate_size=6_144, vocab_size=176_640),
    "llama-3-8b": DecoderConfig(
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8_192,
        rope=Rope(500_000.0),
        tie_word_embeddings=False,
    ),
    "smollm2-135m": DecoderConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8_192,
        rope=Rope(100_000.0),
    ),
    "tiny": DecoderConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        qk_norm=True,
    ),
}
"""Qwen3, Llama 3 and SmolLM2 as in their published config.json; OneRec is Qwen3 with 3 x 8,192 SIDs, padded to 256.

`tiny` runs on any machine.
"""


def random_decoder(shape: str | DecoderConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Build a decoder of this shape directly on the device, its matrices drawn with the usual deviation of 0.02."""
    with torch.device("meta"):
        decoder = Decoder(SHAPES[shape] if isinstance(shape, str) else shape)
    decoder = decoder.to(dtype).to_empty(device=device).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    return decoder
