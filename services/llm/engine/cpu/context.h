// What one tile's rows see for one key/value head: the pages of its context, a chunk at a time, and the softmax over them.
//
// Keys and values are read where they lie in the paged cache. An online softmax (Milakov and Gimelshein 2018) runs over the
// chunks, in fp32. Limits and windows are those of `tiles.py`.

#pragma once

#include <vector>

#include "linear.h"

namespace tailrace {

constexpr int kChunk = 64;
constexpr int kSlice = 4 * kWidth;
constexpr float kUnseen = -1e30f;  // in place of -inf, whose differences are no numbers

// As `CpuTiles` lays them out.
struct Tile {
    int64_t first_row, num_rows, first_limit, limit_step, first_block, num_blocks;
    int64_t window_start, num_sinks, num_sink_blocks, num_skipped;
};

template <class T>
struct Pages {
    const T* keys;
    const T* values;
    const int64_t* blocks;
    int64_t block_tokens, num_groups, head_dim;

    const T* of(const T* slots, int64_t block, int64_t offset, int64_t group) const {
        return slots + ((block * block_tokens + offset) * num_groups + group) * head_dim;
    }
};

// One layer's tails (B, L, G, K), and which of their places each beam sees (B, L).
template <class T>
struct TailPlaces {
    const T* keys;
    const T* values;
    const uint8_t* seen;
    int64_t first_row, num_places;
};

// A chunk of a context: where its keys and values of one head lie, and their positions.
template <class T>
struct Chunk {
    const T* keys[kChunk];
    const T* values[kChunk];
    int32_t positions[kChunk];
    int count = 0;

    void fill(const Pages<T>& pages, const Tile& tile, int64_t group, int64_t first) {
        const int64_t limit = tile.first_limit + (tile.num_rows - 1) * tile.limit_step;
        int64_t place = first / pages.block_tokens, offset = first % pages.block_tokens;
        for (count = 0; count < kChunk && place < tile.num_blocks; place++, offset = 0) {
            const int64_t skipped = place >= tile.num_sink_blocks ? tile.num_skipped : 0;
            const int64_t block = pages.blocks[tile.first_block + place], start = (place + skipped) * pages.block_tokens;
            const int64_t end = std::min({pages.block_tokens, offset + kChunk - count, limit - start});
            for (; offset < end; offset++) {
                keys[count] = pages.of(pages.keys, block, offset, group);
                values[count] = pages.of(pages.values, block, offset, group);
                positions[count++] = int32_t(start + offset);
            }
            if (limit <= start) break;
        }
        for (int rest = count; rest < kChunk; rest++)  // whole vectors of keys; hidden
            keys[rest] = keys[0], values[rest] = values[0], positions[rest] = INT32_MAX;
    }

    // Keys in whole vectors.
    int filled() const { return (count + kWidth - 1) / kWidth * kWidth; }

    void go_to_next_head(int64_t head_dim) {
        for (int c = 0; c < kChunk; c++) keys[c] += head_dim, values[c] += head_dim;
    }
};

// The softmax-weighted sum of values so far, of each query.
struct Sums {
    std::vector<float> peak, total, out;
    int64_t padded;

    void begin(int64_t queries, int64_t head_dim) {
        padded = (head_dim + kSlice - 1) / kSlice * kSlice;
        peak.assign(queries, kUnseen);
        total.assign(queries, 0.0f);
        out.assign(queries * padded, 0.0f);
    }
};

// Turn one query's scores over a chunk into weights: e to the power of `scale` times their distance from the peak. Gives what
// was summed before is to be multiplied by: the peak may have grown.
inline float soften(float* scores, int count, float scale, float& peak, float& total) {
    Floats top = splat(kUnseen), sum = {};
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

// Hide what a query may not see.
inline void show_only(float* scores, const int32_t* positions, int count, const Tile& tile, int64_t row) {
    const int32_t limit = int32_t(tile.first_limit + row * tile.limit_step);
    const int32_t start = int32_t(tile.window_start + row * tile.limit_step), sinks = int32_t(tile.num_sinks);
    for (int c = 0; c < count; c += kWidth) {
        const Ints at = *reinterpret_cast<const Ints*>(positions + c);
        const Ints is_hidden = (at >= limit) | ((at >= sinks) & (at < start));
        store(scores + c, is_hidden ? splat(kUnseen) : load(scores + c));
    }
}

// The queries of a tile that share a key/value head: (rows, heads of the group, K), one after another.
template <class T>
struct Queries {
    const T* q;
    int64_t count, per_group, head_dim;
    float scale;
    const Tile& tile;

    // Whether query `last`, or one before it, sees anything of a chunk.
    bool see(const Chunk<T>& chunk, int64_t last) const {
        return chunk.positions[0] < tile.first_limit + last / per_group * tile.limit_step;
    }

    // Whether all queries from `first` on see all of a chunk.
    bool see_all(const Chunk<T>& chunk, int64_t first) const {
        const bool has_window = tile.window_start + (tile.num_rows - 1) * tile.limit_step > 0;
        return !has_window && chunk.count == kChunk && chunk.positions[kChunk - 1] < tile.first_limit + first / per_group * tile.limit_step;
    }
};

}  // namespace tailrace
