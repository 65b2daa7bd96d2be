// Attention of few queries over the chunks of a context: up to kRows of them at a time.

#pragma once

#include "few_products.h"

namespace tailrace {

template <class T>
TAILRACE_SHARED inline void times_any_keys(int rows, const T* q, const Chunk<T>& chunk, int64_t size, float (*scores)[kChunk], Coming<T>& coming) {
    switch (rows) {
        case 1: return times_keys<1>(q, chunk, size, scores, coming);
        case 2: return times_keys<2>(q, chunk, size, scores, coming);
#if defined(__AVX512F__)
        case 3: return times_keys<3>(q, chunk, size, scores, coming);
        case 4: return times_keys<4>(q, chunk, size, scores, coming);
        case 5: return times_keys<5>(q, chunk, size, scores, coming);
        case 6: return times_keys<6>(q, chunk, size, scores, coming);
#endif
    }
}

template <class T>
TAILRACE_SHARED inline void add_any_values(
    int rows, const T (*w)[kChunk], const Chunk<T>& chunk, int64_t head_dim, float* out, int64_t stride, Coming<T>& coming
) {
    switch (rows) {
        case 1: return add_values<1>(w, chunk, head_dim, out, stride, coming);
        case 2: return add_values<2>(w, chunk, head_dim, out, stride, coming);
#if defined(__AVX512F__)
        case 3: return add_values<3>(w, chunk, head_dim, out, stride, coming);
        case 4: return add_values<4>(w, chunk, head_dim, out, stride, coming);
        case 5: return add_values<5>(w, chunk, head_dim, out, stride, coming);
        case 6: return add_values<6>(w, chunk, head_dim, out, stride, coming);
#endif
    }
}

// How often `attend_few` calls for some of what comes: at every four keys and at every four values.
template <class T>
inline int64_t fetches_of(const Queries<T>& queries, const Chunk<T>& chunk) {
    const int64_t blocks = (queries.count + kRows - 1) / kRows;
    return blocks * (chunk.filled() + (chunk.count + 3)) / 4;
}

// Add a chunk to the queries' sums.
template <class T>
inline void attend_few(const Queries<T>& queries, const Chunk<T>& chunk, Sums& sums, Coming<T>& coming) {
    const int64_t head_dim = queries.head_dim;
    const int filled = chunk.filled();
    alignas(64) float scores[kRows][kChunk];
    alignas(64) T weights[kRows][kChunk];
    for (int64_t i = 0; i < queries.count; i += kRows) {
        const int rows = int(std::min<int64_t>(kRows, queries.count - i));
        if (!queries.see(chunk, i + rows - 1)) continue;
        const bool is_whole = queries.see_all(chunk, i);
        float* out = sums.out.data() + i * sums.padded;
        times_any_keys(rows, queries.q + i * head_dim, chunk, head_dim, scores, coming);
        for (int m = 0; m < rows; m++) {
            if (!is_whole) show_only(scores[m], chunk.positions, filled, queries.tile, (i + m) / queries.per_group);
            const float shrink = soften(scores[m], filled, queries.scale, sums.peak[i + m], sums.total[i + m]);
            for (int c = 0; c < filled; c += kWidth) store(weights[m] + c, load(scores[m] + c));
            if (shrink == 1.0f) continue;
            for (int64_t k = m * sums.padded; k < (m + 1) * sums.padded; k += kWidth) store(out + k, load(out + k) * shrink);
        }
        add_any_values(rows, weights, chunk, head_dim, out, sums.padded, coming);
    }
}

}  // namespace tailrace
