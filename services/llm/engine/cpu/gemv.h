// y = x W^T for few rows x (decode) and a matrix W (out, in) in torch's row-major layout, without packing.
//
// Each thread takes a range of W's rows and reads it once for each block of x that fits the L2 cache. A tile is kCols rows of W by up to
// kRows rows of x, summed along the input in vectors that are reduced at the end. bf16 is multiplied with AVX512-BF16, int8 with
// AVX512-VNNI where the processor has them, 4-bit weights after a lookup in registers; otherwise everything is widened to fp32.

#pragma once

#include <algorithm>
#include <type_traits>

#include "int4.h"

namespace tailrace {

#if defined(__AVX512F__)
constexpr int kRows = 6;
#else
constexpr int kRows = 2;
#endif
constexpr int kCols = 4;
constexpr int64_t kBlockBytes = 256 * 1024;
constexpr int kPrefetchTiles = 2;

// kCols rows of W, which need not be adjacent (gate and up are not). The rows at distance `prefetch` are prefetched into the L2 cache: the
// hardware prefetcher does not follow several short streams, and L1 has too few outstanding misses to hide memory latency.
template <class W>
struct Columns {
    const W* at[kCols];
    int64_t prefetch;
    const uint8_t* multipliers[kCols];  // of 4-bit weights
};

inline void sum_four(Floats a, Floats b, Floats c, Floats d, float* to) {
#if defined(__AVX512F__)
    auto fold = [](Floats x) {
        __m512 y = (__m512)x;
        return _mm256_add_ps(_mm512_castps512_ps256(y), _mm512_extractf32x8_ps(y, 1));
    };
    __m256 ab = _mm256_hadd_ps(fold(a), fold(b)), cd = _mm256_hadd_ps(fold(c), fold(d));
    __m256 abcd = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#else
    to[0] = sum_of(a), to[1] = sum_of(b), to[2] = sum_of(c), to[3] = sum_of(d);
#endif
}

template <int ROWS, class T>
inline void dot_tile(const T* x, int64_t stride, const Columns<T>& w, int64_t size, float (*out)[kCols]) {
    Floats sum[ROWS][kCols] = {};
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) {
        Floats column[kCols];
#pragma GCC unroll 4
        for (int n = 0; n < kCols; n++) column[n] = load(w.at[n] + k);
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            Floats row = load(x + m * stride + k);
#pragma GCC unroll 4
            for (int n = 0; n < kCols; n++) sum[m][n] += row * column[n];
        }
    }
    for (int m = 0; m < ROWS; m++) {
        sum_four(sum[m][0], sum[m][1], sum[m][2], sum[m][3], out[m]);
        for (int64_t rest = k; rest < size; rest++)
            for (int n = 0; n < kCols; n++) out[m][n] += to_float(x[m * stride + rest]) * to_float(w.at[n][rest]);
    }
}

#if defined(__AVX512BF16__)
template <int ROWS>
inline void dot_tile(const Bf16* x, int64_t stride, const Columns<Bf16>& w, int64_t size, float (*out)[kCols]) {
    __m512 sum[ROWS][kCols];
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < kCols; n++) sum[m][n] = _mm512_setzero_ps();
    auto step = [&](int64_t k, auto fetch) __attribute__((always_inline)) {
        __m512bh column[kCols];
#pragma GCC unroll 4
        for (int n = 0; n < kCols; n++) {
            column[n] = fetch(w.at[n] + k);
            _mm_prefetch(reinterpret_cast<const char*>(w.at[n] + w.prefetch + k), _MM_HINT_T1);
        }
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            __m512bh row = fetch(x + m * stride + k);
#pragma GCC unroll 4
            for (int n = 0; n < kCols; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], row, column[n]);
        }
    };
    int64_t k = 0;
    for (; k + 32 <= size; k += 32) step(k, [](const Bf16* from) { return (__m512bh)_mm512_loadu_si512(from); });
    if (k < size) {
        __mmask32 rest = (1u << (size - k)) - 1;
        step(k, [rest](const Bf16* from) { return (__m512bh)_mm512_maskz_loadu_epi16(rest, from); });
    }
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++)
        sum_four((Floats)sum[m][0], (Floats)sum[m][1], (Floats)sum[m][2], (Floats)sum[m][3], out[m]);
}
#endif

#if defined(__AVX512VNNI__)
// Integer sums of x * w; size is a multiple of 64. `fetch(n, k)` returns the 64 weights of column n from k on.
template <int ROWS, class Fetch>
inline void dot_bytes(const uint8_t* x, int64_t stride, int64_t size, Fetch fetch, float (*out)[kCols]) {
    __m512i sum[ROWS][kCols];
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < kCols; n++) sum[m][n] = _mm512_setzero_si512();
    for (int64_t k = 0; k < size; k += 64) {
        __m512i column[kCols];
#pragma GCC unroll 4
        for (int n = 0; n < kCols; n++) column[n] = fetch(n, k);
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            __m512i row = _mm512_loadu_si512(x + m * stride + k);
#pragma GCC unroll 4
            for (int n = 0; n < kCols; n++) sum[m][n] = _mm512_dpbusd_epi32(sum[m][n], row, column[n]);
        }
    }
    auto real = [](__m512i whole) { return (Floats)_mm512_cvtepi32_ps(whole); };  // exact below 2^24, otherwise rounded to fp32
    for (int m = 0; m < ROWS; m++)
        sum_four(real(sum[m][0]), real(sum[m][1]), real(sum[m][2]), real(sum[m][3]), out[m]);
}
#endif

template <int ROWS>
inline void dot_tile(const uint8_t* x, int64_t stride, const Columns<int8_t>& w, int64_t size, float (*out)[kCols]) {
#if defined(__AVX512VNNI__)
    const auto fetch = [&](int n, int64_t k) __attribute__((always_inline)) {
        _mm_prefetch(reinterpret_cast<const char*>(w.at[n] + w.prefetch + k), _MM_HINT_T1);
        return _mm512_loadu_si512(w.at[n] + k);
    };
    dot_bytes<ROWS>(x, stride, size, fetch, out);
#else
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < kCols; n++) {
            int32_t total = 0;
            for (int64_t k = 0; k < size; k++) total += int32_t(x[m * stride + k]) * w.at[n][k];
            out[m][n] = float(total);
        }
#endif
}

template <int ROWS>
inline void dot_tile(const uint8_t* x, int64_t stride, const Columns<Int4>& w, int64_t size, float (*out)[kCols]) {
#if defined(__AVX512VNNI__)
    const auto fetch = [&](int n, int64_t k) __attribute__((always_inline)) {
        _mm_prefetch(reinterpret_cast<const char*>(w.at[n] + w.prefetch + k / 2), _MM_HINT_T1);
        return unpack_block(w.at[n] + k / 2, w.multipliers[n] + k / 32);
    };
    dot_bytes<ROWS>(x, stride, size, fetch, out);
#else
    int32_t totals[ROWS][kCols] = {};
    for (int64_t k = 0; k < size; k += kBlockWeights)
        for (int n = 0; n < kCols; n++) {
            int8_t column[kBlockWeights];
            unpack_block(w.at[n] + k / 2, w.multipliers[n] + k / 32, column);
            for (int m = 0; m < ROWS; m++) {
                int32_t total = 0;
                for (int64_t i = 0; i < kBlockWeights; i++) total += int32_t(x[m * stride + k + i]) * column[i];
                totals[m][n] += total;
            }
        }
    for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < kCols; n++) out[m][n] = float(totals[m][n]);
#endif
}

template <class X, class W>
TAILRACE_SHARED inline void dispatch_dot_tile(int rows, const X* x, int64_t stride, const Columns<W>& w, int64_t size, float (*out)[kCols]) {
    switch (rows) {
        case 1: return dot_tile<1>(x, stride, w, size, out);
        case 2: return dot_tile<2>(x, stride, w, size, out);
#if defined(__AVX512F__)
        case 3: return dot_tile<3>(x, stride, w, size, out);
        case 4: return dot_tile<4>(x, stride, w, size, out);
        case 5: return dot_tile<5>(x, stride, w, size, out);
        case 6: return dot_tile<6>(x, stride, w, size, out);
#endif
    }
}

// One thread's share of `count` elements, in whole units.
struct Range {
    int64_t first, last;
    Range(int64_t count, int64_t unit, int thread, int threads) {
        const int64_t units = (count + unit - 1) / unit;
        first = std::min(count, units * thread / threads * unit);
        last = std::min(count, units * (thread + 1) / threads * unit);
    }
};

// Contiguous rows of x, and a matrix W of `parts` (1, or 2: gate and up) times `width` rows, all `size` numbers long.
template <class X, class W>
struct Product {
    static constexpr int64_t kPacked = std::is_same_v<W, Int4> ? 2 : 1;  // numbers in one W

    const X* x;
    const W* w;
    int64_t rows, size, width;
    int parts;
    const uint8_t* multipliers = nullptr;  // of 4-bit weights, one for each 32
    const uint32_t* strips = nullptr;      // of a packed matrix, whose w is not read

    int64_t stride() const { return size / kPacked; }
    int64_t index_of(int part, int64_t n) const { return part * width + std::min(n, width - 1); }
    const W* row_of(int part, int64_t n) const { return w + index_of(part, n) * stride(); }
    const uint8_t* multipliers_of(int part, int64_t n) const { return multipliers + index_of(part, n) * (size / 32); }
};

// One thread's columns `range` of each part. `put(row, n, y, count)` receives `count` columns from n on: y[part] points to their sums.
template <class X, class W, class Put>
inline void gemv(const Product<X, W>& product, Range range, Put put) {
    const int64_t tiles = (product.rows + kRows - 1) / kRows;
    const int64_t tiles_of_block = std::max<int64_t>(1, kBlockBytes / (int64_t(sizeof(X)) * product.size * kRows));
    for (int64_t first = 0; first < tiles; first += tiles_of_block) {
        const int64_t last = std::min(tiles, first + tiles_of_block);
        for (int64_t n = range.first; n < range.last; n += kCols) {
            Columns<W> columns[2];
            for (int part = 0; part < product.parts; part++) {
                for (int i = 0; i < kCols; i++) {
                    columns[part].at[i] = product.row_of(part, n + i);
                    if constexpr (std::is_same_v<W, Int4>) columns[part].multipliers[i] = product.multipliers_of(part, n + i);
                }
                columns[part].prefetch = kPrefetchTiles * kCols * product.stride();
            }
            for (int64_t tile = first; tile < last; tile++) {
                const int64_t begin = product.rows * tile / tiles, end = product.rows * (tile + 1) / tiles;
                float sums[2][kRows][kCols];
                for (int part = 0; part < product.parts; part++)
                    dispatch_dot_tile(int(end - begin), product.x + begin * product.size, product.size, columns[part], product.size, sums[part]);
                for (int64_t row = begin; row < end; row++) {
                    float* y[2] = {sums[0][row - begin], sums[1][row - begin]};
                    put(row, n, y, int(std::min<int64_t>(kCols, range.last - n)));
                }
            }
        }
    }
}

}  // namespace tailrace
