// A few queries times the keys of a chunk, and their weights times its values: both multiplied as they lie.
//
// With AVX-512 four keys' sums are folded into a register's four lanes, and 16 keys' into one register; bf16's values are multiplied
// in pairs of keys. The weights of the values are rounded to the model's dtype, as they are by a GPU's matrix units.

#pragma once

#include "coming.h"
#include "words.h"

namespace tailrace {

#if defined(__AVX512F__)

// Four keys, which lie anywhere, times the queries: parts[m] has a lane for each key, whose four numbers sum to the product.
template <int ROWS, class T>
inline void times_four(const T* q, const T* const (&keys)[4], int64_t size, __m512* parts) {
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
    for (; k + kNumbers<T> <= size; k += kNumbers<T>) step(k, load_whole<T>);
    if (k < size) step(k, [&](const T* from) { return load_some(from, size - k); });
    const auto halve = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD)); };
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++) parts[m] = halve(halve(sum[m][0], sum[m][1]), halve(sum[m][2], sum[m][3]));
}

// scores[m] = q_m times the keys of a chunk, in whole vectors.
template <int ROWS, class T>
inline void times_keys(const T* q, const Chunk<T>& chunk, int64_t size, float (*scores)[kChunk], Coming<T>& coming) {
    const auto zip = [](__m512 a, __m512 b) { return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))); };
    for (int c = 0; c < chunk.count; c += 16) {
        __m512 parts[4][ROWS];
        for (int i = 0; i < 4; i++) {
            coming.fetch();
            const T* const* keys = chunk.keys + c + i;
            times_four<ROWS>(q, {keys[0], keys[4], keys[8], keys[12]}, size, parts[i]);
        }
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            const __m512d even = zip(parts[0][m], parts[1][m]), odd = zip(parts[2][m], parts[3][m]);
            _mm512_store_ps(scores[m] + c, _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)), _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd))));
        }
    }
}

// out[m] += weights[m] V for up to kRows queries; V's rows lie anywhere.
template <int ROWS, class T>
inline void add_values(const T (*weights)[kChunk], const Chunk<T>& chunk, int64_t head_dim, float* out, int64_t stride, Coming<T>& coming) {
    const auto add_slice = [&](int64_t first, auto fetch) __attribute__((always_inline)) {
        __m512 sum[ROWS][4];
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) sum[m][v] = _mm512_loadu_ps(out + m * stride + first + v * 16);
        for (int c = 0; c < chunk.count; c += kKeysOfWord<T>) {
            if (c % 4 == 0) coming.fetch();
            __m512i value[4];
            values_of(chunk, c, first, fetch, value);
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
    for (; first + kSlice <= head_dim; first += kSlice) add_slice(first, [](const T* from, int) { return load_whole(from); });
    if (first < head_dim) add_slice(first, [&](const T* from, int offset) { return load_some(from, head_dim - first - offset); });
}

#else

template <int ROWS, class T>
inline void times_keys(const T* q, const Chunk<T>& chunk, int64_t size, float (*scores)[kChunk], Coming<T>& coming) {
    for (int c = 0; c < chunk.filled(); c += kCols) {
        coming.fetch();
        float products[ROWS][kCols];
        const Columns<T> columns = {{chunk.keys[c], chunk.keys[c + 1], chunk.keys[c + 2], chunk.keys[c + 3]}, 0};
        dot_tile<ROWS>(q, size, columns, size, products);
        for (int m = 0; m < ROWS; m++) std::copy_n(products[m], kCols, scores[m] + c);
    }
}

template <int ROWS, class T>
inline void add_values(const T (*weights)[kChunk], const Chunk<T>& chunk, int64_t head_dim, float* out, int64_t stride, Coming<T>& coming) {
    int64_t first = 0;
    for (; first + kSlice <= head_dim; first += kSlice) {
        Floats sum[ROWS][4];
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) sum[m][v] = load(out + m * stride + first + v * kWidth);
        for (int c = 0; c < chunk.count; c++) {
            if (c % 4 == 0) coming.fetch();
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

}  // namespace tailrace
