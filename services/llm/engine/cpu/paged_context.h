// The paged context of one tile for one key/value head, in chunks, and the online softmax over the chunks.
//
// Keys and values are read in place from the paged cache. The online softmax (Milakov and Gimelshein 2018) is in fp32. Limits and windows
// are those of `tiles.py`.

#pragma once

#include <vector>

#include "gemv.h"

namespace tailrace {

constexpr int kChunk = 64;
constexpr int kSlice = 4 * kWidth;
constexpr float kMasked = -1e30f;  // instead of -inf: -inf minus -inf is NaN

// A row of `TileTable` in `forward.py`.
struct Tile {
    int64_t first_row, num_rows, first_limit, limit_step, first_block, num_blocks;
    int64_t window_start, num_sinks, num_sink_blocks, num_skipped;
};

template <class T>
struct Pages {
    const T* keys;
    const T* values;
    const int64_t* blocks;
    int64_t block_tokens, num_kv_heads, head_dim;

    const T* of(const T* slots, int64_t block, int64_t offset, int64_t kv_head) const {
        return slots + ((block * block_tokens + offset) * num_kv_heads + kv_head) * head_dim;
    }
};

// One layer's tails (B, L, G, K), and which of their positions each beam sees (B, L).
template <class T>
struct TailPlaces {
    const T* keys;
    const T* values;
    const uint8_t* seen;
    int64_t first_row, num_places;
};

// A chunk of a context: the addresses of its keys and values for one head, and their positions.
template <class T>
struct Chunk {
    const T* keys[kChunk];
    const T* values[kChunk];
    int32_t positions[kChunk];
    int count = 0;

    void fill(const Pages<T>& pages, const Tile& tile, int64_t kv_head, int64_t first) {
        const int64_t limit = tile.first_limit + (tile.num_rows - 1) * tile.limit_step;
        int64_t place = first / pages.block_tokens, offset = first % pages.block_tokens;
        for (count = 0; count < kChunk && place < tile.num_blocks; place++, offset = 0) {
            const int64_t skipped = place >= tile.num_sink_blocks ? tile.num_skipped : 0;
            const int64_t block = pages.blocks[tile.first_block + place], start = (place + skipped) * pages.block_tokens;
            const int64_t end = std::min({pages.block_tokens, offset + kChunk - count, limit - start});
            for (; offset < end; offset++) {
                keys[count] = pages.of(pages.keys, block, offset, kv_head);
                values[count] = pages.of(pages.values, block, offset, kv_head);
                positions[count++] = int32_t(start + offset);
            }
            if (limit <= start) break;
        }
        for (int rest = count; rest < kChunk; rest++)  // pad to whole vectors; masked
            keys[rest] = keys[0], values[rest] = values[0], positions[rest] = INT32_MAX;
    }

    // The number of keys, rounded up to whole vectors.
    int filled() const { return (count + kWidth - 1) / kWidth * kWidth; }

    void go_to_next_head(int64_t head_dim) {
        for (int c = 0; c < kChunk; c++) keys[c] += head_dim, values[c] += head_dim;
    }
};

// The online softmax of each query: maximum score, sum of weights, and weighted sum of values.
struct SoftmaxState {
    std::vector<float> peak, total, out;
    int64_t padded;

    void begin(int64_t queries, int64_t head_dim) {
        padded = (head_dim + kSlice - 1) / kSlice * kSlice;
        peak.assign(queries, kMasked);
        total.assign(queries, 0.0f);
        out.assign(queries * padded, 0.0f);
    }
};

// Replace one query's scores over a chunk by their weights, exp(scale * (score - peak)). Returns the factor by which earlier sums must be
// multiplied, because the peak may have grown.
inline float online_softmax(float* scores, int count, float scale, float& peak, float& total) {
    Floats top = splat(kMasked), sum = {};
    for (int c = 0; c < count; c += kWidth) top = larger_of(top, load(scores + c));
    const float new_peak = std::max(peak, max_of(top)), shrink = new_peak == peak ? 1.0f : exp_of(splat((peak - new_peak) * scale))[0];
    for (int c = 0; c < count; c += kWidth) {
        const Floats weight = exp_of((load(scores + c) - new_peak) * scale);
        store(scores + c, weight);
        sum += weight;
    }
    total = total * shrink + sum_of(sum);
    peak = new_peak;
    return shrink;
}

// Mask the positions that a query does not see.
inline void mask_unseen(float* scores, const int32_t* positions, int count, const Tile& tile, int64_t row) {
    const int32_t limit = int32_t(tile.first_limit + row * tile.limit_step);
    const int32_t start = int32_t(tile.window_start + row * tile.limit_step), sinks = int32_t(tile.num_sinks);
    for (int c = 0; c < count; c += kWidth) {
        const Ints at = *reinterpret_cast<const Ints*>(positions + c);
        const Ints is_hidden = (at >= limit) | ((at >= sinks) & (at < start));
        store(scores + c, is_hidden ? splat(kMasked) : load(scores + c));
    }
}

// The queries of a tile that share a key/value head: (rows, heads of the group, K), one after another.
template <class T>
struct Queries {
    const T* q;
    int64_t count, per_group, head_dim;
    float scale;
    const Tile& tile;

    // Whether any query up to `last` sees any position of a chunk.
    bool any_sees(const Chunk<T>& chunk, int64_t last) const {
        return chunk.positions[0] < tile.first_limit + last / per_group * tile.limit_step;
    }

    // Whether all queries from `first` on see every position of a chunk.
    bool all_see(const Chunk<T>& chunk, int64_t first) const {
        const bool has_window = tile.window_start + (tile.num_rows - 1) * tile.limit_step > 0;
        return !has_window && chunk.count == kChunk && chunk.positions[kChunk - 1] < tile.first_limit + first / per_group * tile.limit_step;
    }
};

}  // namespace tailrace
