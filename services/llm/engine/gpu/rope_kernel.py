"""Head norms, rope and the write into the paged cache in one Triton kernel, between the QKV projection and attention.

A program handles a few heads of one row, in fp32. Keys and values are rounded to the rows' dtype, then stored in the
cache's format: the model's dtype, or one byte per number with a scale for each token and head. Rows without a slot are
beams, whose keys and values go to their tails. Compared with `TorchOps.rope_and_store` in the tests.

Shape suffixes: T rows, M heads of a program, P pairs of a head (K / 2), H query heads, G key/value heads, K head size,
X = (H + 2 G) * K.
"""

import triton
import triton.language as tl
from torch import Tensor

from services.llm.engine.beam.tails import TailCells
from services.llm.engine.forward.weights import HeadNorms
from services.llm.engine.kv.cache import Slots

_INT8_PEAK, _FP8_PEAK = 127.0, 448.0
_HEADS_AT_ONCE = 8


def rope_and_store(
    qkv_TX: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    eps: float,
    slots: Slots,
    slot_mapping_P: Tensor,
    tail: TailCells | None,
) -> Tensor:
    """Return queries (T, H, K).

    Keys and values of the first P rows are written to their slots, the keys and values of the remaining rows to the
    cells of their tails.
    """
    cos_TK, sin_TK = cos_sin
    num_rows, head_dim = cos_TK.shape
    num_kv_heads = slots.keys.shape[1]
    num_heads = qkv_TX.shape[1] // head_dim - 2 * num_kv_heads
    q_THK = qkv_TX.new_empty(num_rows, num_heads, head_dim)
    tail_k, tail_v, cell_B = (qkv_TX, qkv_TX, slot_mapping_P) if tail is None else tail
    query_norm_K, key_norm_K = (qkv_TX, qkv_TX) if norms is None else (norms.query_K, norms.key_K)
    _rope_and_store[(num_rows * triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS_AT_ONCE),)](
        qkv_TX,
        cos_TK,
        sin_TK,
        query_norm_K,
        key_norm_K,
        slot_mapping_P,
        cell_B,
        q_THK,
        tail_k,
        tail_v,
        slots.keys,
        slots.values,
        slots.keys if slots.key_scales is None else slots.key_scales,
        slots.values if slots.value_scales is None else slots.value_scales,
        len(slot_mapping_P),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        NUM_PAIRS=head_dim // 2,
        PAIRS_PAD=triton.next_power_of_2(head_dim // 2),
        HEADS=_HEADS_AT_ONCE,
        HAS_NORMS=norms is not None,
        PEAK=_peak(slots),
        num_warps=1,
    )
    return q_THK


def _peak(slots: Slots) -> float:
    """Return the largest magnitude of a code, 0 for a cache in the model's dtype."""
    if slots.key_scales is None:
        return 0.0
    return _FP8_PEAK if slots.keys.is_floating_point() else _INT8_PEAK


@triton.jit(do_not_specialize=["num_stored"])  # type: ignore[untyped-decorator]
def _rope_and_store(  # type: ignore[no-untyped-def]
    qkv_ptr,  # noqa: ANN001 - Triton's own types
    cos_ptr,  # noqa: ANN001
    sin_ptr,  # noqa: ANN001
    query_norm_ptr,  # noqa: ANN001
    key_norm_ptr,  # noqa: ANN001
    slot_mapping_ptr,  # noqa: ANN001
    cell_ptr,  # noqa: ANN001
    q_ptr,  # noqa: ANN001
    tail_k_ptr,  # noqa: ANN001
    tail_v_ptr,  # noqa: ANN001
    cache_k_ptr,  # noqa: ANN001
    cache_v_ptr,  # noqa: ANN001
    k_scale_ptr,  # noqa: ANN001
    v_scale_ptr,  # noqa: ANN001
    num_stored,  # noqa: ANN001
    eps,  # noqa: ANN001
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PEAK: tl.constexpr,
) -> None:
    """Handle a few heads of one row. Query heads come first, then key heads, then value heads."""
    NUM_ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    num_programs_a_row = tl.cdiv(NUM_ALL, HEADS)
    row = (tl.program_id(0) // num_programs_a_row).to(tl.int64)
    head_M = tl.program_id(0) % num_programs_a_row * HEADS + tl.arange(0, HEADS)
    pair_P = tl.arange(0, PAIRS_PAD)
    is_pair_P = pair_P < NUM_PAIRS
    is_query_M, is_value_M = head_M < NUM_HEADS, head_M >= NUM_HEADS + NUM_KV_HEADS
    is_head_MP = (head_M < NUM_ALL)[:, None] & is_pair_P[None, :]
    cell_MP = head_M[:, None] * 2 * NUM_PAIRS + pair_P[None, :]

    from_ptr = qkv_ptr + row * NUM_ALL * 2 * NUM_PAIRS
    low_MP = tl.load(from_ptr + cell_MP, mask=is_head_MP, other=0.0).to(tl.float32)
    high_MP = tl.load(from_ptr + NUM_PAIRS + cell_MP, mask=is_head_MP, other=0.0).to(tl.float32)
    cos_P = tl.load(cos_ptr + row * 2 * NUM_PAIRS + pair_P, mask=is_pair_P, other=0.0).to(tl.float32)
    sin_P = tl.load(sin_ptr + row * 2 * NUM_PAIRS + pair_P, mask=is_pair_P, other=0.0).to(tl.float32)
    normed_low_MP, normed_high_MP = low_MP, high_MP
    if HAS_NORMS:
        square_M = tl.sum(low_MP * low_MP, 1) + tl.sum(high_MP * high_MP, 1)
        shrink_M1 = tl.rsqrt(square_M / (2 * NUM_PAIRS) + eps)[:, None]
        normed_low_MP *= shrink_M1 * _norm_of(query_norm_ptr, key_norm_ptr, is_query_M, pair_P, is_pair_P)
        high_pair_P = NUM_PAIRS + pair_P
        normed_high_MP *= shrink_M1 * _norm_of(query_norm_ptr, key_norm_ptr, is_query_M, high_pair_P, is_pair_P)
    rotated_low_MP = normed_low_MP * cos_P[None, :] - normed_high_MP * sin_P[None, :]
    rotated_high_MP = normed_high_MP * cos_P[None, :] + normed_low_MP * sin_P[None, :]
    low_MP = tl.where(is_value_M[:, None], low_MP, rotated_low_MP).to(q_ptr.dtype.element_ty)
    high_MP = tl.where(is_value_M[:, None], high_MP, rotated_high_MP).to(q_ptr.dtype.element_ty)

    is_query_MP = is_head_MP & is_query_M[:, None]
    is_value_MP = is_head_MP & is_value_M[:, None]
    is_key_MP = is_head_MP & ~(is_query_M | is_value_M)[:, None]
    _store(q_ptr + row * NUM_HEADS * 2 * NUM_PAIRS + cell_MP, low_MP, high_MP, is_query_MP, NUM_PAIRS)
    first_key, first_value = NUM_HEADS, NUM_HEADS + NUM_KV_HEADS
    if row >= num_stored:
        cell = tl.load(cell_ptr + row - num_stored).to(tl.int64) * NUM_KV_HEADS
        _store(tail_k_ptr + (cell - first_key) * 2 * NUM_PAIRS + cell_MP, low_MP, high_MP, is_key_MP, NUM_PAIRS)
        _store(tail_v_ptr + (cell - first_value) * 2 * NUM_PAIRS + cell_MP, low_MP, high_MP, is_value_MP, NUM_PAIRS)
    else:
        slot = tl.load(slot_mapping_ptr + row).to(tl.int64) * NUM_KV_HEADS
        cache_k_MP = cache_k_ptr + (slot - first_key) * 2 * NUM_PAIRS + cell_MP
        cache_v_MP = cache_v_ptr + (slot - first_value) * 2 * NUM_PAIRS + cell_MP
        if PEAK > 0.0:
            scale_M, low_code_MP, high_code_MP = _quantise(low_MP.to(tl.float32), high_MP.to(tl.float32), PEAK)
            is_key_M = (head_M >= first_key) & ~is_value_M
            tl.store(k_scale_ptr + slot - first_key + head_M, scale_M, mask=is_key_M)
            tl.store(v_scale_ptr + slot - first_value + head_M, scale_M, mask=is_value_M & (head_M < NUM_ALL))
            _store(cache_k_MP, low_code_MP, high_code_MP, is_key_MP, NUM_PAIRS)
            _store(cache_v_MP, low_code_MP, high_code_MP, is_value_MP, NUM_PAIRS)
        else:
            _store(cache_k_MP, low_MP, high_MP, is_key_MP, NUM_PAIRS)
            _store(cache_v_MP, low_MP, high_MP, is_value_MP, NUM_PAIRS)


@triton.jit
def _norm_of(query_norm_ptr, key_norm_ptr, is_query_M, dim_P, is_pair_P):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Return the norm weights (M, P) of query and key heads."""
    query_P = tl.load(query_norm_ptr + dim_P, mask=is_pair_P, other=0.0).to(tl.float32)
    key_P = tl.load(key_norm_ptr + dim_P, mask=is_pair_P, other=0.0).to(tl.float32)
    return tl.where(is_query_M[:, None], query_P[None, :], key_P[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(low_MP, high_MP, PEAK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Return the scale of each head (M,), and its codes of magnitude up to PEAK."""
    scale_M = tl.div_rn(tl.maximum(tl.max(tl.abs(low_MP), 1), tl.max(tl.abs(high_MP), 1)), PEAK)
    divisor_M1 = tl.where(scale_M == 0.0, 1.0, scale_M)[:, None]
    low_MP, high_MP = tl.div_rn(low_MP, divisor_M1), tl.div_rn(high_MP, divisor_M1)
    if PEAK == 127.0:  # round to nearest even by adding and subtracting 1.5 * 2^23
        low_MP = (low_MP + 12582912.0) - 12582912.0
        high_MP = (high_MP + 12582912.0) - 12582912.0
    return scale_M, low_MP, high_MP


@triton.jit  # type: ignore[untyped-decorator]
def _store(ptr_MP, low_MP, high_MP, mask_MP, NUM_PAIRS: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    """Store the two halves of heads in the dtype of the destination."""
    tl.store(ptr_MP, low_MP.to(ptr_MP.dtype.element_ty), mask=mask_MP)
    tl.store(ptr_MP + NUM_PAIRS, high_MP.to(ptr_MP.dtype.element_ty), mask=mask_MP)
