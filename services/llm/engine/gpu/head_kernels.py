"""Between the joined projection and attention, in one Triton kernel: head norms, rotary positions, and the write into the paged cache.

One program handles one head of one row, in fp32. Keys and values are rounded to the rows' dtype, then stored as the cache
keeps them: as they are, or as one byte a number with a scale for each token and head. Rows beyond those with a slot are
beams, which are only given back. Held to `TorchKernels.turn_and_store`, also in Triton's interpreter on a CPU.

Shape suffixes: T rows, P pairs of a head (K / 2), H query heads, G key/value heads, K head size, X = (H + 2 G) * K.
"""

import triton
import triton.language as tl
from torch import Tensor

from services.llm.engine.kv_cache import Slots
from services.llm.engine.weights import HeadNorms

_INT8_PEAK, _FP8_PEAK = 127.0, 448.0


def turn_and_store(
    qkv_TX: Tensor,
    turns: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    eps: float,
    slots: Slots,
    slots_P: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give queries (T, H, K), keys and values (T, G, K); the first rows' keys and values are in their slots as well."""
    cos_TK, sin_TK = turns
    num_rows, head_dim = cos_TK.shape
    num_groups = slots.keys.shape[1]
    num_heads = qkv_TX.shape[1] // head_dim - 2 * num_groups
    q_THK = qkv_TX.new_empty(num_rows, num_heads, head_dim)
    k_TGK, v_TGK = (qkv_TX.new_empty(num_rows, num_groups, head_dim) for _ in range(2))
    query_norm_K, key_norm_K = (qkv_TX, qkv_TX) if norms is None else (norms.query_K, norms.key_K)
    _turn_and_store[(num_rows, num_heads + 2 * num_groups)](
        qkv_TX,
        cos_TK,
        sin_TK,
        query_norm_K,
        key_norm_K,
        slots_P,
        q_THK,
        k_TGK,
        v_TGK,
        slots.keys,
        slots.values,
        slots.keys if slots.key_scales is None else slots.key_scales,
        slots.values if slots.value_scales is None else slots.value_scales,
        len(slots_P),
        eps,
        NUM_HEADS=num_heads,
        NUM_GROUPS=num_groups,
        NUM_PAIRS=head_dim // 2,
        PAIRS_PAD=triton.next_power_of_2(head_dim // 2),
        HAS_NORMS=norms is not None,
        PEAK=_peak(slots),
        num_warps=1,
    )
    return q_THK, k_TGK, v_TGK


def _peak(slots: Slots) -> float:
    """Give the largest magnitude of a code; 0 where numbers are kept as they are."""
    if slots.key_scales is None:
        return 0.0
    return _FP8_PEAK if slots.keys.is_floating_point() else _INT8_PEAK


@triton.jit(do_not_specialize=["num_stored"])  # type: ignore[untyped-decorator]
def _turn_and_store(  # type: ignore[no-untyped-def]
    qkv_ptr,  # noqa: ANN001 - Triton's own types
    cos_ptr,  # noqa: ANN001
    sin_ptr,  # noqa: ANN001
    query_norm_ptr,  # noqa: ANN001
    key_norm_ptr,  # noqa: ANN001
    slots_ptr,  # noqa: ANN001
    q_ptr,  # noqa: ANN001
    k_ptr,  # noqa: ANN001
    v_ptr,  # noqa: ANN001
    cache_k_ptr,  # noqa: ANN001
    cache_v_ptr,  # noqa: ANN001
    k_scale_ptr,  # noqa: ANN001
    v_scale_ptr,  # noqa: ANN001
    num_stored,  # noqa: ANN001
    eps,  # noqa: ANN001
    NUM_HEADS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PEAK: tl.constexpr,
) -> None:
    """Handle one head of one row: the query heads come first, then the key heads, then the value heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair_P = tl.arange(0, PAIRS_PAD)
    is_pair_P = pair_P < NUM_PAIRS
    from_ptr = qkv_ptr + (row * (NUM_HEADS + 2 * NUM_GROUPS) + head) * 2 * NUM_PAIRS
    low_P = tl.load(from_ptr + pair_P, mask=is_pair_P, other=0.0).to(tl.float32)
    high_P = tl.load(from_ptr + NUM_PAIRS + pair_P, mask=is_pair_P, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_GROUPS:
        if HAS_NORMS:
            norm_ptr = query_norm_ptr if head < NUM_HEADS else key_norm_ptr
            shrink = tl.rsqrt((tl.sum(low_P * low_P, 0) + tl.sum(high_P * high_P, 0)) / (2 * NUM_PAIRS) + eps)
            low_P *= shrink * tl.load(norm_ptr + pair_P, mask=is_pair_P, other=0.0).to(tl.float32)
            high_P *= shrink * tl.load(norm_ptr + NUM_PAIRS + pair_P, mask=is_pair_P, other=0.0).to(tl.float32)
        cos_P = tl.load(cos_ptr + row * 2 * NUM_PAIRS + pair_P, mask=is_pair_P, other=0.0).to(tl.float32)
        sin_P = tl.load(sin_ptr + row * 2 * NUM_PAIRS + pair_P, mask=is_pair_P, other=0.0).to(tl.float32)
        turned_P = low_P * cos_P - high_P * sin_P
        high_P = high_P * cos_P + low_P * sin_P
        low_P = turned_P
    low_P, high_P = low_P.to(q_ptr.dtype.element_ty), high_P.to(q_ptr.dtype.element_ty)

    if head < NUM_HEADS:
        _store(q_ptr + (row * NUM_HEADS + head) * 2 * NUM_PAIRS, low_P, high_P, is_pair_P, NUM_PAIRS)
    else:
        is_key = head < NUM_HEADS + NUM_GROUPS
        place = row * NUM_GROUPS + (head - NUM_HEADS) % NUM_GROUPS
        _store((k_ptr if is_key else v_ptr) + place * 2 * NUM_PAIRS, low_P, high_P, is_pair_P, NUM_PAIRS)
        if row < num_stored:
            place = tl.load(slots_ptr + row).to(tl.int64) * NUM_GROUPS + (head - NUM_HEADS) % NUM_GROUPS
            cell_ptr = (cache_k_ptr if is_key else cache_v_ptr) + place * 2 * NUM_PAIRS
            if PEAK > 0.0:
                scale_ptr = (k_scale_ptr if is_key else v_scale_ptr) + place
                _store_coded(
                    cell_ptr, scale_ptr, low_P.to(tl.float32), high_P.to(tl.float32), is_pair_P, NUM_PAIRS, PEAK
                )
            else:
                _store(cell_ptr, low_P, high_P, is_pair_P, NUM_PAIRS)


@triton.jit  # type: ignore[untyped-decorator]
def _store_coded(ptr, scale_ptr, low_P, high_P, is_pair_P, NUM_PAIRS: tl.constexpr, PEAK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    """Store a head as codes of magnitude up to PEAK, and what they are to be multiplied by."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(low_P), 0), tl.max(tl.abs(high_P), 0)), PEAK)
    tl.store(scale_ptr, scale)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    low_P, high_P = tl.div_rn(low_P, divisor), tl.div_rn(high_P, divisor)
    if PEAK == 127.0:  # round to even, as adding and taking away 1.5 * 2^23 does
        low_P = (low_P + 12582912.0) - 12582912.0
        high_P = (high_P + 12582912.0) - 12582912.0
    _store(ptr, low_P, high_P, is_pair_P, NUM_PAIRS)


@triton.jit  # type: ignore[untyped-decorator]
def _store(ptr, low_P, high_P, is_pair_P, NUM_PAIRS: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    """Store the two halves of a head in the dtype of what is pointed at."""
    pair_P = tl.arange(0, low_P.shape[0])
    tl.store(ptr + pair_P, low_P.to(ptr.dtype.element_ty), mask=is_pair_P)
    tl.store(ptr + NUM_PAIRS + pair_P, high_P.to(ptr.dtype.element_ty), mask=is_pair_P)
