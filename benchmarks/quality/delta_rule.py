"""The gated delta rule: attention whose state has a fixed size (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464).

Each head keeps a matrix of values by keys. A token first decays the matrix, then moves the value stored under its key
towards its own value by the fraction `write`:

    S_t = decay_t S_(t-1) + write_t (v_t - decay_t S_(t-1) k_t) k_t^T,    out_t = S_t q_t

so the state is the only memory of the history. `delta_rule` computes many tokens at once, `delta_step` a single token;
both continue from a given state.

Shape suffixes: B rows, H heads, L positions, K key size, V value size, C positions of a chunk.
"""

import torch
from torch import Tensor

CHUNK_TOKENS = 64


def delta_step(
    state_BHVK: Tensor, q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, write_BH: Tensor, log_decay_BH: Tensor
) -> tuple[Tensor, Tensor]:
    """Return one token's output (B, H, V) and the state after it."""
    decayed_BHVK = state_BHVK * log_decay_BH.exp()[..., None, None]
    change_BHV = write_BH[..., None] * (v_BHV - (decayed_BHVK @ k_BHK[..., None])[..., 0])
    state_BHVK = decayed_BHVK + change_BHV[..., None] * k_BHK[..., None, :]
    return (state_BHVK @ q_BHK[..., None])[..., 0], state_BHVK


def delta_rule(
    state_BHVK: Tensor, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLV: Tensor, write_BHL: Tensor, log_decay_BHL: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, H, L, V) of all tokens and the state after the last.

    The tokens of a chunk are solved for together, as a triangular system; the state passes from chunk to chunk.
    """
    outputs = []
    parts = (torch.split(x, CHUNK_TOKENS, dim=2) for x in (q_BHLK, k_BHLK, v_BHLV, write_BHL, log_decay_BHL))
    for q_BHCK, k_BHCK, v_BHCV, write_BHC, log_decay_BHC in zip(*parts, strict=True):
        out_BHCV, state_BHVK = _chunk(state_BHVK, q_BHCK, k_BHCK, v_BHCV, write_BHC, log_decay_BHC)
        outputs.append(out_BHCV)
    return torch.cat(outputs, dim=2), state_BHVK


def _chunk(
    state_BHVK: Tensor, q_BHCK: Tensor, k_BHCK: Tensor, v_BHCV: Tensor, write_BHC: Tensor, log_decay_BHC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs and state of one chunk.

    With the chunk's change u_t of each token, S_t is the decayed first state plus the decayed sum of u_i k_i^T, so
    u_t + write_t sum_(i<t) decay_(i..t) (k_i . k_t) u_i = write_t (v_t - decay_(0..t) S_0 k_t).
    """
    total_BHC = log_decay_BHC.cumsum(dim=-1)
    since_BHCC = (total_BHC[..., :, None] - total_BHC[..., None, :]).tril().exp().tril()
    from_state_BHC1 = total_BHC.exp()[..., None]
    keys_BHCC = write_BHC[..., None] * since_BHCC * (k_BHCK @ k_BHCK.mT)
    own_BHCV = write_BHC[..., None] * (v_BHCV - from_state_BHC1 * (k_BHCK @ state_BHVK.mT))
    change_BHCV = torch.linalg.solve_triangular(keys_BHCC.tril(-1), own_BHCV, upper=False, unitriangular=True)
    out_BHCV = from_state_BHC1 * (q_BHCK @ state_BHVK.mT) + (since_BHCC * (q_BHCK @ k_BHCK.mT)) @ change_BHCV
    to_end_BHC1 = (total_BHC[..., -1:] - total_BHC).exp()[..., None]
    kept_BHVK = state_BHVK * total_BHC[..., -1].exp()[..., None, None]
    return out_BHCV, kept_BHVK + (change_BHCV * to_end_BHC1).mT @ k_BHCK
