"""The few fused operations that a forward pass is made of besides attention, and what they mean in plain torch.

Faster kernels keep this protocol and are held to `TorchKernels`. All work on flat rows, wait for nothing and keep no state.

Shape suffixes: T rows of the step, P rows whose keys and values go to the paged cache (the first ones), D hidden,
H query heads, G key/value heads, K head size, X = (H + 2 G) * K, F feed-forward, J = 2 F, N and I out and in of a matrix.
"""

from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn import functional

from models.decoder.rope import rotate
from services.llm.engine.forward.weights import HeadNorms
from services.llm.engine.kv.cache import KvCache


class Heads(NamedTuple):
    """A step's queries, keys and values, ready for attention."""

    q_THK: Tensor
    k_TGK: Tensor
    v_TGK: Tensor


class Kernels(Protocol):
    """What the layers need. Results are new tensors in the dtype of the rows; sums and norms are made in fp32."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise each row by its root mean square."""
        ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add rows to the residual. Gives the sum normalised, and the sum."""
        ...

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
        """Norm the query and key heads where there are norms, turn them by cosine and sine (T, K), and store the first P rows.

        Rows beyond P belong to beams; their keys and values are only given back.
        """
        ...

    def silu_mul(self, gate_up_TJ: Tensor) -> Tensor:
        """Return silu(gate) * up (T, F)."""
        ...

    def linear(self, x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
        """Multiply rows by a matrix (out, in)."""
        ...


class TorchKernels:
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
        turns: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        eps: float,
        cache: KvCache,
        layer: int,
        slots_P: Tensor,
    ) -> Heads:
        """Split, norm, turn, write."""
        num_groups, head_dim = cache.num_groups, turns[0].shape[-1]
        heads_TNK = qkv_TX.view(len(qkv_TX), -1, head_dim)
        q_THK, k_TGK = heads_TNK[:, : -2 * num_groups], heads_TNK[:, -2 * num_groups : -num_groups]
        v_TGK = heads_TNK[:, -num_groups:]
        if norms is not None:
            q_THK, k_TGK = self.rms_norm(q_THK, norms.query_K, eps), self.rms_norm(k_TGK, norms.key_K, eps)
        heads = Heads(rotate(q_THK, *turns), rotate(k_TGK, *turns), v_TGK)
        cache.write(layer, slots_P, heads.k_TGK[: len(slots_P)], v_TGK[: len(slots_P)])
        return heads

    def silu_mul(self, gate_up_TJ: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        gate_TF, up_TF = gate_up_TJ.chunk(2, dim=-1)
        return functional.silu(gate_TF) * up_TF

    def linear(self, x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
        """Multiply by torch's own."""
        return functional.linear(x_TI, weight_NI, bias_N)
