"""The forward pass of a CUDA device: one layer after another in Python, over Triton's kernels and cuBLAS.

What Python costs is recorded away: see `graphs.py`.
"""

from services.llm.engine.forward.layers import LayerLoop
from services.llm.engine.forward.weights import Weights
from services.llm.engine.gpu.attention import TritonAttention
from services.llm.engine.gpu.kernels import TritonKernels
from services.llm.engine.kv.cache import KvCache


def triton_forward(weights: Weights, cache: KvCache) -> LayerLoop:
    """Build it for these weights, where they lie."""
    shape = weights.config
    attention = TritonAttention(
        shape.num_attention_heads, shape.num_key_value_heads, cache.block_tokens, weights.head_VD.device, shape.window
    )
    return LayerLoop(weights, cache, TritonKernels(), attention)
