// Attention of few queries (decode) over the chunks of a context, up to kRows queries at a time, on unpacked keys and values.
//
// With AVX-512 the sums of four keys are reduced into a register's four lanes, and those of 16 keys into one register; bf16 values are
// multiplied in pairs of keys. Weights are rounded to the model's dtype, as by a GPU's matrix units.

#pragma once

#include "prefetch.h"
#include "kv_vectors.h"

namespace tailrace {

#if defined(__AVX512F__)

// Four keys at any addresses times the queries: parts[m] has a 128-bit lane per key, whose four numbers sum to the product.
template <int ROWS, class T>
inline void dot_four_keys(const T* q, const T* const (&keys)[4], int64_t size, __m512* parts) {
    __m512 sum[ROWS][4];
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) sum[m][n] = _mm512_setzero_ps();
    const auto step = [&](int64_t k, auto fetch) __attribute__((always_inline)) {
        __m512i key[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) key[n] = fetch(keys[n] + k);
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            const __m512i row = fetch(q + m * size + k);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) sum[m][n] = add_products(sum[m][n], row, key[n], T{});
        }
    };
    int64_t k = 0;
    for (; k + kLanes<T> <= size; k += kLanes<T>) step(k, load_vector<T>);
    if (k < size) step(k, [&](const T* from) { return load_masked(from, size - k); });
    const auto add_halves = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD)); };
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++) parts[m] = add_halves(add_halves(sum[m][0], sum[m][1]), add_halves(sum[m][2], sum[m][3]));
}

// scores[m] = q_m times the keys of a chunk, in whole vectors.
template <int ROWS, class T>
inline void dot_keys(const T* q, const Chunk<T>& chunk, int64_t size, float (*scores)[kChunk], Prefetcher<T>& prefetcher) {
    const auto add_pairs = [](__m512 a, __m512 b) { return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))); };
    for (int c = 0; c < chunk.count; c += 16) {
        __m512 parts[4][ROWS];
        for (int i = 0; i < 4; i++) {
            prefetcher.fetch();
            const T* const* keys = chunk.keys + c + i;
            dot_four_keys<ROWS>(q, {keys[0], keys[4], keys[8], keys[12]}, size, parts[i]);
        }
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            const __m512d even = add_pairs(parts[0][m], parts[1][m]), odd = add_pairs(parts[2][m], parts[3][m]);
            _mm512_store_ps(scores[m] + c, _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)), _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd))));
        }
    }
}

// out[m] += weights[m] V for up to kRows queries; the rows of V are at any addresses.
template <int ROWS, class T>
inline void accumulate_values(const T (*weights)[kChunk], const Chunk<T>& chunk, int64_t head_dim, float* out, int64_t stride, Prefetcher<T>& prefetcher) {
    const auto add_slice = [&](int64_t first, auto fetch) __attribute__((always_inline)) {
        __m512 sum[ROWS][4];
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) sum[m][v] = _mm512_loadu_ps(out + m * stride + first + v * 16);
        for (int c = 0; c < chunk.count; c += kKeysPerWord<T>) {
            if (c % 4 == 0) prefetcher.fetch();
            __m512i value[4];
            load_values(chunk, c, first, fetch, value);
#pragma GCC unroll 6
            for (int m = 0; m < ROWS; m++) {
                int32_t word;
                std::memcpy(&word, weights[m] + c, 4);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) sum[m][v] = add_products(sum[m][v], _mm512_set1_epi32(word), value[v], T{});
            }
        }
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) _mm512_storeu_ps(out + m * stride + first + v * 16, sum[m][v]);
    };
    int64_t first = 0;
    for (; first + kSlice <= head_dim; first += kSlice) add_slice(first, [](const T* from, int) { return load_vector(from); });
    if (first < head_dim) add_slice(first, [&](const T* from, int offset) { return load_masked(from, head_dim - first - offset); });
}

#else

template <int ROWS, class T>
inline void dot_keys(const T* q, const Chunk<T>& chunk, int64_t size, float (*scores)[kChunk], Prefetcher<T>& prefetcher) {
    for (int c = 0; c < chunk.filled(); c += kCols) {
        prefetcher.fetch();
        float products[ROWS][kCols];
        const Columns<T> columns = {{chunk.keys[c], chunk.keys[c + 1], chunk.keys[c + 2], chunk.keys[c + 3]}, 0};
        dot_tile<ROWS>(q, size, columns, size, products);
        for (int m = 0; m < ROWS; m++) std::copy_n(products[m], kCols, scores[m] + c);
    }
}

template <int ROWS, class T>
inline void accumulate_values(const T (*weights)[kChunk], const Chunk<T>& chunk, int64_t head_dim, float* out, int64_t stride, Prefetcher<T>& prefetcher) {
    int64_t first = 0;
    for (; first + kSlice <= head_dim; first += kSlice) {
        Floats sum[ROWS][4];
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) sum[m][v] = load(out + m * stride + first + v * kWidth);
        for (int c = 0; c < chunk.count; c++) {
            if (c % 4 == 0) prefetcher.fetch();
            Floats value[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) value[v] = load(chunk.values[c] + first + v * kWidth);
#pragma GCC unroll 6
            for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) sum[m][v] += value[v] * to_float(weights[m][c]);
        }
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) store(out + m * stride + first + v * kWidth, sum[m][v]);
    }
    if (first == head_dim) return;
    for (int c = 0; c < chunk.count; c++)
        for (int m = 0; m < ROWS; m++)
            for (int64_t k = first; k < head_dim; k++) out[m * stride + k] += to_float(weights[m][c]) * to_float(chunk.values[c][k]);
}

#endif


template <class T>
TAILRACE_SHARED inline void dispatch_dot_keys(int rows, const T* q, const Chunk<T>& chunk, int64_t size, float (*scores)[kChunk], Prefetcher<T>& prefetcher) {
    switch (rows) {
        case 1: return dot_keys<1>(q, chunk, size, scores, prefetcher);
        case 2: return dot_keys<2>(q, chunk, size, scores, prefetcher);
#if defined(__AVX512F__)
        case 3: return dot_keys<3>(q, chunk, size, scores, prefetcher);
        case 4: return dot_keys<4>(q, chunk, size, scores, prefetcher);
        case 5: return dot_keys<5>(q, chunk, size, scores, prefetcher);
        case 6: return dot_keys<6>(q, chunk, size, scores, prefetcher);
#endif
    }
}

template <class T>
TAILRACE_SHARED inline void dispatch_accumulate_values(
    int rows, const T (*w)[kChunk], const Chunk<T>& chunk, int64_t head_dim, float* out, int64_t stride, Prefetcher<T>& prefetcher
) {
    switch (rows) {
        case 1: return accumulate_values<1>(w, chunk, head_dim, out, stride, prefetcher);
        case 2: return accumulate_values<2>(w, chunk, head_dim, out, stride, prefetcher);
#if defined(__AVX512F__)
        case 3: return accumulate_values<3>(w, chunk, head_dim, out, stride, prefetcher);
        case 4: return accumulate_values<4>(w, chunk, head_dim, out, stride, prefetcher);
        case 5: return accumulate_values<5>(w, chunk, head_dim, out, stride, prefetcher);
        case 6: return accumulate_values<6>(w, chunk, head_dim, out, stride, prefetcher);
#endif
    }
}

// The number of prefetch calls of `attend_gemv`: one for every four keys and one for every four values.
template <class T>
inline int64_t num_prefetches(const Queries<T>& queries, const Chunk<T>& chunk) {
    const int64_t blocks = (queries.count + kRows - 1) / kRows;
    return blocks * (chunk.filled() + (chunk.count + 3)) / 4;
}

// Add a chunk to the queries' softmax states.
template <class T>
inline void attend_gemv(const Queries<T>& queries, const Chunk<T>& chunk, SoftmaxState& sums, Prefetcher<T>& prefetcher) {
    const int64_t head_dim = queries.head_dim;
    const int filled = chunk.filled();
    alignas(64) float scores[kRows][kChunk];
    alignas(64) T weights[kRows][kChunk];
    for (int64_t i = 0; i < queries.count; i += kRows) {
        const int rows = int(std::min<int64_t>(kRows, queries.count - i));
        if (!queries.any_sees(chunk, i + rows - 1)) continue;
        const bool is_whole = queries.all_see(chunk, i);
        float* out = sums.out.data() + i * sums.padded;
        dispatch_dot_keys(rows, queries.q + i * head_dim, chunk, head_dim, scores, prefetcher);
        for (int m = 0; m < rows; m++) {
            if (!is_whole) mask_unseen(scores[m], chunk.positions, filled, queries.tile, (i + m) / queries.per_group);
            const float shrink = online_softmax(scores[m], filled, queries.scale, sums.peak[i + m], sums.total[i + m]);
            for (int c = 0; c < filled; c += kWidth) store(weights[m] + c, load(scores[m] + c));
            if (shrink == 1.0f) continue;
            for (int64_t k = m * sums.padded; k < (m + 1) * sums.padded; k += kWidth) store(out + k, load(out + k) * shrink);
        }
        dispatch_accumulate_values(rows, weights, chunk, head_dim, out, sums.padded, prefetcher);
    }
}

}  // namespace tailrace
