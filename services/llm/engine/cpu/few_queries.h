// Attention of few queries over the chunks of a context: keys and values are multiplied as they lie.

#pragma once

#include "context.h"

namespace tailrace {

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

// Add a chunk to the queries' sums.
template <class T>
inline void attend_few(const Queries<T>& queries, const Chunk<T>& chunk, Sums& sums) {
    const int64_t head_dim = queries.head_dim;
    const int filled = (chunk.count + kWidth - 1) / kWidth * kWidth;
    float scores[kRows][kChunk];
    for (int64_t i = 0; i < queries.count; i += kRows) {
        const int rows = int(std::min<int64_t>(kRows, queries.count - i));
        if (!queries.see(chunk, i + rows - 1)) continue;
        for (int c = 0; c < filled; c += kCols) {
            float products[kRows][kCols];
            const Columns<T> columns = {{chunk.keys[c], chunk.keys[c + 1], chunk.keys[c + 2], chunk.keys[c + 3]}, 0};
            any_tile(rows, queries.q + i * head_dim, head_dim, columns, head_dim, products);
            for (int m = 0; m < rows; m++) std::copy_n(products[m], kCols, scores[m] + c);
        }
        float* out = sums.out.data() + i * sums.padded;
        for (int m = 0; m < rows; m++) {
            show_only(scores[m], chunk.positions, filled, queries.tile, (i + m) / queries.per_group);
            const float shrink = soften(scores[m], filled, queries.scale, sums.peak[i + m], sums.total[i + m]);
            if (shrink == 1.0f) continue;
            for (int64_t k = m * sums.padded; k < (m + 1) * sums.padded; k += kWidth) store(out + k, load(out + k) * shrink);
        }
        add_any_values(rows, scores, chunk, head_dim, out, sums.padded);
    }
}

}  // namespace tailrace
