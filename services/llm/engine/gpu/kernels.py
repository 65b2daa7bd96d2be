"""The fused operations of a forward pass on a CUDA device: Triton's kernels behind the protocol, matrices by torch (cuBLAS)."""

from torch import Tensor
from torch.nn import functional

from services.llm.engine.forward.ops import Heads
from services.llm.engine.forward.weights import HeadNorms
from services.llm.engine.gpu import head_kernels, norm_kernels
from services.llm.engine.kv.cache import KvCache


class TritonKernels:
    """Any model dtype, on CUDA (or, interpreted, on a CPU)."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise each row by its root mean square."""
        return norm_kernels.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add, then normalise."""
        return norm_kernels.add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def rope_and_store(
        self,
        qkv_TX: Tensor,
        turns: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        eps: float,
        cache: KvCache,
        layer: int,
        slots_P: Tensor,
    ) -> Heads:
        """Norm, turn and store the heads in one go."""
        return Heads(*head_kernels.rope_and_store(qkv_TX, turns, norms, eps, cache.slots(layer), slots_P))

    def silu_mul(self, gate_up_TJ: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        return norm_kernels.silu_mul(gate_up_TJ)

    def linear(self, x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
        """Multiply by cuBLAS."""
        return functional.linear(x_TI, weight_NI, bias_N)
