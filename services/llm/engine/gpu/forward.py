"""The forward pass on a CUDA device: the layer loop over Triton kernels and cuBLAS.

The cost of launching kernels from Python is removed by graphs, see `graphs.py`.
"""

from torch import Tensor
from torch.nn import functional

from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.layers import LayerLoop
from services.llm.engine.forward.weights import HeadNorms, Weights
from services.llm.engine.gpu import norm_kernels, rope_kernel
from services.llm.engine.gpu.attention import TritonAttention
from services.llm.engine.kv.cache import KvCache


def triton_forward(weights: Weights, cache: KvCache) -> LayerLoop:
    """Build the forward pass on the device of the weights."""
    shape = weights.config
    attention = TritonAttention(
        shape.num_attention_heads, shape.num_key_value_heads, cache.block_tokens, weights.head_VD.device, shape.window
    )
    return LayerLoop(weights, cache, TritonOps(), attention)


class TritonOps:
    """Implements `Ops` in any model dtype on CUDA (or on a CPU in Triton's interpreter)."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise each row by its root mean square."""
        return norm_kernels.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add, then normalise."""
        return norm_kernels.add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def rope_and_store(
        self,
        qkv_TX: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        eps: float,
        cache: KvCache,
        layer: int,
        slot_mapping_P: Tensor,
        tails: Tails | None,
    ) -> Tensor:
        """Norm, rotate and store the heads in one kernel."""
        tail = None if tails is None else tails.layer(layer)
        return rope_kernel.rope_and_store(qkv_TX, cos_sin, norms, eps, cache.slots(layer), slot_mapping_P, tail)

    def silu_mul(self, gate_up_TJ: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        return norm_kernels.silu_mul(gate_up_TJ)

    def linear(self, x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
        """Multiply with cuBLAS."""
        return functional.linear(x_TI, weight_NI, bias_N)
