"""The fused operations of a forward pass other than attention, and their definition in plain torch.

Faster kernels implement the same protocol and are compared with `TorchOps`. All operations work on flat rows, do not
wait for the device and keep no state.

Shape suffixes: T rows of the step, P rows whose keys and values go to the paged cache (the first rows), D hidden, H
query heads, G key/value heads, K head size, X = (H + 2 G) * K, F feed-forward, J = 2 F, N and I out and in of a matrix.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from models.decoder.rope import rotate
from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.weights import HeadNorms
from services.llm.engine.kv.cache import KvCache


class Ops(Protocol):
    """The operations that the layers call.

    Results are new tensors in the dtype of the rows; sums and norms are computed in fp32.
    """

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise each row by its root mean square."""
        ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add rows to the residual. Returns the normalised sum, and the sum."""
        ...

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
        """Apply head norms (if any) and rope, store keys and values, and return the queries (T, H, K).

        `cos_sin` are cosine and sine (T, K) of each row's position. The first P rows' keys and values go to their slots
        of the cache. Rows beyond P are beams, whose keys and values go to their slots in `tails`.
        """
        ...

    def silu_mul(self, gate_up_TJ: Tensor) -> Tensor:
        """Return silu(gate) * up (T, F)."""
        ...

    def linear(self, x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
        """Multiply rows by a matrix (out, in)."""
        ...


class TorchOps:
    """The reference: any device, any dtype."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise each row by its root mean square."""
        return functional.rms_norm(x_TD.float(), weight_D.shape, weight_D.float(), eps).to(x_TD.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add, then normalise."""
        total_TD = residual_TD + x_TD
        return self.rms_norm(total_TD, weight_D, eps), total_TD

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
        """Split, norm, rotate, write."""
        num_kv_heads, head_dim = cache.num_kv_heads, cos_sin[0].shape[-1]
        heads_TNK = qkv_TX.view(len(qkv_TX), -1, head_dim)
        q_THK, k_TGK = heads_TNK[:, : -2 * num_kv_heads], heads_TNK[:, -2 * num_kv_heads : -num_kv_heads]
        v_TGK = heads_TNK[:, -num_kv_heads:]
        if norms is not None:
            q_THK, k_TGK = self.rms_norm(q_THK, norms.query_K, eps), self.rms_norm(k_TGK, norms.key_K, eps)
        k_TGK, num_stored = rotate(k_TGK, *cos_sin), len(slot_mapping_P)
        cache.write(layer, slot_mapping_P, k_TGK[:num_stored], v_TGK[:num_stored])
        if tails is not None:
            tails.write(layer, k_TGK[num_stored:], v_TGK[num_stored:])
        return rotate(q_THK, *cos_sin)

    def silu_mul(self, gate_up_TJ: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        gate_TF, up_TF = gate_up_TJ.chunk(2, dim=-1)
        return functional.silu(gate_TF) * up_TF

    def linear(self, x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
        return functional.linear(x_TI, weight_NI, bias_N)
