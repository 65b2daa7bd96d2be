// Attention of one tile's rows, for one key/value head, over the pages of its context and then over the beams' tails.
//
// Keys and values are read where they lie in the paged cache. Scores exist for a few queries by kChunk positions at a
// time; an online softmax (Milakov and Gimelshein 2018) runs over the chunks, in fp32. Limits and windows are those of `tiles.py`.

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

// Rows of one group lie apart: the processor does not foresee them.
template <class T>
inline void fetch_ahead(const T* row, int64_t size) {
    for (int64_t k = 0; k < size; k += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + k, 0, 2);
}

// A chunk of a context: where its keys and values lie, and their positions.
template <class T>
struct Chunk {
    const T* keys[kChunk];
    const T* values[kChunk];
    int32_t positions[kChunk];
    int count;

    void fill(const Pages<T>& pages, const Tile& tile, int64_t group, int64_t first) {
        const int64_t end = std::min(first + kChunk, tile.num_blocks * pages.block_tokens);
        const int64_t limit = tile.first_limit + (tile.num_rows - 1) * tile.limit_step;
        count = 0;
        for (int64_t index = first; index < end; index++) {
            const int64_t place = index / pages.block_tokens, offset = index % pages.block_tokens;
            const int64_t skipped = place >= tile.num_sink_blocks ? tile.num_skipped : 0;
            const int64_t position = (place + skipped) * pages.block_tokens + offset;
            if (position >= limit) break;
            const int64_t block = pages.blocks[tile.first_block + place];
            keys[count] = pages.of(pages.keys, block, offset, group);
            values[count] = pages.of(pages.values, block, offset, group);
            fetch_ahead(keys[count], pages.head_dim);
            fetch_ahead(values[count], pages.head_dim);
            positions[count++] = int32_t(position);
        }
        for (int rest = count; rest < kChunk; rest++)  // whole tiles of kCols; hidden
            keys[rest] = keys[0], values[rest] = values[0], positions[rest] = INT32_MAX;
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

// out[m] += weights[m] V for up to kRows queries; V's rows lie anywhere.
template <int ROWS, class T>
inline void add_values(const float (*weights)[kChunk], const Chunk<T>& chunk, int64_t head_dim, float* out, int64_t stride) {
    int64_t first = 0;
    for (; first + kSlice <= head_dim; first += kSlice) {
        Floats sum[ROWS][4];
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) sum[m][v] = load(out + m * stride + first + v * kWidth);
        for (int c = 0; c < chunk.count; c++) {
            Floats value[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) value[v] = load(chunk.values[c] + first + v * kWidth);
#pragma GCC unroll 6
            for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) sum[m][v] += value[v] * weights[m][c];
        }
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) store(out + m * stride + first + v * kWidth, sum[m][v]);
    }
    if (first == head_dim) return;
    for (int c = 0; c < chunk.count; c++)
        for (int m = 0; m < ROWS; m++)
            for (int64_t k = first; k < head_dim; k++) out[m * stride + k] += weights[m][c] * to_float(chunk.values[c][k]);
}

template <class T>
TAILRACE_SHARED inline void add_any_values(int rows, const float (*w)[kChunk], const Chunk<T>& chunk, int64_t head_dim, float* out, int64_t stride) {
    switch (rows) {
        case 1: return add_values<1>(w, chunk, head_dim, out, stride);
        case 2: return add_values<2>(w, chunk, head_dim, out, stride);
#if defined(__AVX512F__)
        case 3: return add_values<3>(w, chunk, head_dim, out, stride);
        case 4: return add_values<4>(w, chunk, head_dim, out, stride);
        case 5: return add_values<5>(w, chunk, head_dim, out, stride);
        case 6: return add_values<6>(w, chunk, head_dim, out, stride);
#endif
    }
}

// Turn one query's scores over a chunk into weights, and shrink what was summed before to the new peak.
inline void soften(float* scores, int count, float& peak, float& total, float* out, int64_t padded) {
    Floats top = splat(kUnseen);
    for (int c = 0; c < count; c += kWidth) top = larger_of(top, load(scores + c));
    const float new_peak = std::max(peak, max_of(top)), shrink = std::exp(peak - new_peak);
    Floats sum = {};
    for (int c = 0; c < count; c += kWidth) {
        const Floats weight = exp_of(load(scores + c) - new_peak);
        store(scores + c, weight);
        sum += weight;
    }
    if (new_peak != peak) {
        for (int64_t k = 0; k < padded; k += kWidth) store(out + k, load(out + k) * shrink);
        total *= shrink;
        peak = new_peak;
    }
    total += sum_of(sum);
}

// Scale a query's scores, and hide what it may not see.
inline void show_only(float* scores, const int32_t* positions, int count, float scale, const Tile& tile, int64_t row) {
    const int32_t limit = int32_t(tile.first_limit + row * tile.limit_step);
    const int32_t start = int32_t(tile.window_start + row * tile.limit_step), sinks = int32_t(tile.num_sinks);
    for (int c = 0; c < count; c++) {
        const bool is_hidden = positions[c] >= limit || (positions[c] >= sinks && positions[c] < start);
        scores[c] = is_hidden ? kUnseen : scores[c] * scale;
    }
}

template <class T>
inline void attend_tails(
    const T* q, const TailPlaces<T>& tails, const Tile& tile, int64_t group, int64_t num_groups, int64_t per_group, int64_t head_dim,
    float scale, Sums& sums
) {
    for (int64_t i = 0; i < tile.num_rows * per_group; i++) {
        const int64_t beam = tile.first_row + i / per_group - tails.first_row;
        for (int64_t place = 0; place < tails.num_places; place++) {
            const int64_t at = beam * tails.num_places + place;
            if (!tails.seen[at]) continue;
            const T* key = tails.keys + (at * num_groups + group) * head_dim;
            const T* value = tails.values + (at * num_groups + group) * head_dim;
            float score = 0, *out = sums.out.data() + i * sums.padded;
            for (int64_t k = 0; k < head_dim; k++) score += to_float(q[i * head_dim + k]) * to_float(key[k]);
            score *= scale;
            const float peak = std::max(sums.peak[i], score);
            const float shrink = std::exp(sums.peak[i] - peak), share = std::exp(score - peak);
            for (int64_t k = 0; k < head_dim; k++) out[k] = out[k] * shrink + share * to_float(value[k]);
            sums.total[i] = sums.total[i] * shrink + share;
            sums.peak[i] = peak;
        }
    }
}

// q (T, H, K) -> out (T, H, K), the tile's rows and the group's heads of both.
template <class T>
inline void attend(
    const T* q, const Pages<T>& pages, const TailPlaces<T>* tails, const Tile& tile, int64_t group, int64_t num_heads, Sums& sums,
    std::vector<T>& queries, T* out
) {
    const int64_t head_dim = pages.head_dim, per_group = num_heads / pages.num_groups, num_queries = tile.num_rows * per_group;
    const float scale = 1.0f / std::sqrt(float(head_dim));
    auto place_of = [&](int64_t i) {
        return ((tile.first_row + i / per_group) * num_heads + group * per_group + i % per_group) * head_dim;
    };
    sums.begin(num_queries, head_dim);
    queries.resize(num_queries * head_dim);
    for (int64_t i = 0; i < num_queries; i++) std::copy_n(q + place_of(i), head_dim, queries.data() + i * head_dim);

    Chunk<T> chunk;
    float scores[kRows][kChunk];
    for (int64_t first = 0; first < tile.num_blocks * pages.block_tokens; first += kChunk) {
        chunk.fill(pages, tile, group, first);
        if (chunk.count == 0) break;
        const int filled = (chunk.count + kWidth - 1) / kWidth * kWidth;
        for (int64_t i = 0; i < num_queries; i += kRows) {
            const int rows = int(std::min<int64_t>(kRows, num_queries - i));
            if (chunk.positions[0] >= tile.first_limit + (i + rows - 1) / per_group * tile.limit_step) continue;
            for (int c = 0; c < filled; c += kCols) {
                float sums_of[kRows][kCols];
                const Columns<T> columns = {{chunk.keys[c], chunk.keys[c + 1], chunk.keys[c + 2], chunk.keys[c + 3]}, 0};
                any_tile(rows, queries.data() + i * head_dim, head_dim, columns, head_dim, sums_of);
                for (int m = 0; m < rows; m++) std::copy_n(sums_of[m], kCols, scores[m] + c);
            }
            for (int m = 0; m < rows; m++) {
                show_only(scores[m], chunk.positions, filled, scale, tile, (i + m) / per_group);
                soften(scores[m], filled, sums.peak[i + m], sums.total[i + m], sums.out.data() + (i + m) * sums.padded, sums.padded);
            }
            add_any_values(rows, scores, chunk, head_dim, sums.out.data() + i * sums.padded, sums.padded);
        }
    }
    if (tails != nullptr && tile.first_row >= tails->first_row)
        attend_tails(queries.data(), *tails, tile, group, pages.num_groups, per_group, head_dim, scale, sums);
    for (int64_t i = 0; i < num_queries; i++)
        for (int64_t k = 0; k < head_dim; k++)
            store_one(out + place_of(i) + k, sums.out[i * sums.padded + k] / sums.total[i]);
}

}  // namespace tailrace
