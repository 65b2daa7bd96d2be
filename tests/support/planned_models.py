"""Model shapes for several planner tests, from published configs."""

from typing import Any

from pipelines.planner.shapes import DecoderShape


def llama(**changes: Any) -> DecoderShape:
    """Return Llama-2-7B, or a decoder with these differences."""
    sizes: dict[str, Any] = {
        "name": "llama",
        "num_layers": 32,
        "hidden_size": 4_096,
        "num_heads": 32,
        "num_kv_heads": 32,
        "head_dim": 128,
        "ffn_size": 11_008,
        "vocab_size": 32_000,
        "is_tied": False,
        "vector_numbers": 2 * 4_096,
    }
    return DecoderShape(**sizes | changes)


LLAMA_2_7B = llama()
LLAMA_3_8B = llama(num_kv_heads=8, ffn_size=14_336, vocab_size=128_256)
SMOLLM2_135M = llama(
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn_size=1_536,
    vocab_size=49_152,
    is_tied=True,
    vector_numbers=2 * 576,
)


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51_200) -> DecoderShape:
    """A GPT of Megatron and llm-foundry: plain feed-forward of four widths, learned positions, tied tables."""
    return DecoderShape(
        name="gpt",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        ffn_matrices=2,
        vocab_size=vocab,
        num_positions=2_048,
    )
