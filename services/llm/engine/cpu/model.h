// The library's arguments as C structs of plain pointers, so that no header of torch is needed. `library.py` declares the same structs.

#pragma once

#include "paged_context.h"

namespace tailrace {

// A matrix (out, in): in the model's dtype, or rows of int8 or of 4 bits (int4.h), padded to 64, with each row's scale and sum.
struct TailraceMatrix {
    const void* weight;      // rows; null if packed
    const uint32_t* strips;  // null unless packed
    const void* bias;
    const float* scales;   // null: in the model's dtype
    const int32_t* sums;   // of the row's int8 numbers
    const uint8_t* multipliers;  // null unless of 4 bits
};

// Norms, then matrices, in the order of NORMS and MATRICES of models/decoder/layer.py.
struct TailraceLayer {
    const void *attention_norm, *query_norm, *key_norm, *ffn_norm;
    TailraceMatrix qkv, output, gate_up, down;
};

// The adapters of a joined matrix, in the model's dtype: down (slots, projections, rank, in) and up (slots, rank, out).
struct TailraceSlots {
    const void *down, *up;
};

// In the order of MATRICES.
struct TailraceLayerSlots {
    TailraceSlots qkv, output, gate_up, down;
};

// Rows first to end - 1, which belong to a slot.
struct TailraceSegment {
    int64_t first, end, slot;
};

// The slots of rows, -1 for the base. No segments: all rows belong to the base.
struct TailraceAdapterRows {
    int64_t num_segments;
    const TailraceSegment* segments;
    const int64_t* slots;
};

struct TailraceModel {
    int64_t is_bf16, is_quantised, hidden, num_heads, num_kv_heads, head_dim, ffn, num_layers;  // is_quantised: the layers' matrices
    float eps, rope_scale;  // of the RMS norms; factor of cosine and sine
    const TailraceLayer* layers;
    TailraceMatrix embedding;
    const void* norm;
    const float* periods;  // (K / 2,) positions per radian
};

struct TailraceStep {
    int64_t rows, paged_rows, num_tiles;
    const int64_t *tokens, *positions, *slot_mapping, *block_table;
    const Tile* tiles;
    const Tile* windowed_tiles;
    const uint8_t* is_windowed;  // by layer
    void *keys, *values;
    int64_t layer_slots, block_tokens;
    void *tail_keys, *tail_values;
    const int64_t* tail_places;
    const uint8_t* tail_seen;
    int64_t num_tail_places, num_outputs;
    const int64_t* output_rows;  // ascending; not read if all rows are
    void* hidden;                // of the output rows
    TailraceAdapterRows adapter_rows, output_adapter_rows;
    int64_t slot_rank;
    const int64_t* slot_ranks;  // of the adapter in each slot
    const TailraceLayerSlots* adapters;
};

}  // namespace tailrace
