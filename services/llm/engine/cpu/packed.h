// y = x W^T for many rows x: W's rows are turned on the fly, a few vectors of columns at a time, into a buffer of the thread's own.
//
// A lane is then a column, so nothing is summed across lanes, and the turning (a few percent of the work from about 64 rows
// on) is paid once for all rows. Everything is moved in words of 32 bits: one fp32, two bf16 or four int8. AVX-512 alone.

#pragma once

#include <vector>

#include "linear.h"

namespace tailrace {

#if defined(__AVX512F__)
constexpr bool kCanPack = true;
#else
constexpr bool kCanPack = false;
#endif
constexpr int kVectors = 4;

#if defined(__AVX512F__)

// 16 rows of 16 words -> 16 vectors, each of one word of all rows, `stride` words apart.
TAILRACE_SHARED inline void turn_words(const uint32_t* const* rows, int64_t at, uint32_t* out, int64_t stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + at);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xDD);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88), high2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xDD);
        _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(out + (4 + i) * stride, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(out + (8 + i) * stride, _mm512_shuffle_i32x4(low, low2, 0xDD));
        _mm512_storeu_si512(out + (12 + i) * stride, _mm512_shuffle_i32x4(high, high2, 0xDD));
    }
}

inline __m512 add_products(__m512 sum, __m512i x, __m512i w, float) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
}
inline __m512 plain(__m512 sum) { return sum; }

#if defined(__AVX512BF16__)
inline __m512 add_products(__m512 sum, __m512i x, __m512i w, Bf16) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
#else
inline __m512 add_products(__m512 sum, __m512i x, __m512i w, Bf16) {
    const __m512i mask = _mm512_set1_epi32(0xFFFF0000);
    sum = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(w, 16), sum);
    return _mm512_fmadd_ps((__m512)_mm512_and_si512(x, mask), (__m512)_mm512_and_si512(w, mask), sum);
}
#endif

#if defined(__AVX512VNNI__)
inline __m512i add_products(__m512i sum, __m512i x, __m512i w, int8_t) { return _mm512_dpbusd_epi32(sum, x, w); }
#else
inline __m512i add_products(__m512i sum, __m512i x, __m512i w, int8_t) {

    const auto low = [&](__m512i bytes, bool is_signed) {
        return is_signed ? _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8) : _mm512_and_si512(bytes, _mm512_set1_epi16(255));
    };
    const auto high = [&](__m512i bytes, bool is_signed) { return is_signed ? _mm512_srai_epi16(bytes, 8) : _mm512_srli_epi16(bytes, 8); };

    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(low(x, false), low(w, true)));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(high(x, false), high(w, true)));
}
#endif
inline __m512 plain(__m512i sum) { return _mm512_cvtepi32_ps(sum); }

template <class W> struct SumOf { using type = __m512; };
template <> struct SumOf<int8_t> { using type = __m512i; };

// out[m][v] for ROWS rows by VECS vectors of columns; `packed` is (words, VECS, 16).
template <int ROWS, int VECS, class W>
inline void packed_tile(const uint32_t* x, int64_t stride, const uint32_t* packed, int64_t words, float (*out)[kVectors * 16]) {
    typename SumOf<W>::type sum[ROWS][VECS];
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[m][v] = typename SumOf<W>::type{};
    for (int64_t k = 0; k < words; k++) {
        __m512i column[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) column[v] = _mm512_loadu_si512(packed + (k * VECS + v) * 16);
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++) {
            const __m512i word = _mm512_set1_epi32(int32_t(x[m * stride + k]));
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[m][v] = add_products(sum[m][v], word, column[v], W{});
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) _mm512_storeu_ps(out[m] + v * 16, plain(sum[m][v]));
}

template <int VECS, class W>
TAILRACE_SHARED inline void any_packed_tile(int rows, const uint32_t* x, int64_t stride, const uint32_t* packed, int64_t words, float (*out)[kVectors * 16]) {
    switch (rows) {
        case 1: return packed_tile<1, VECS, W>(x, stride, packed, words, out);
        case 2: return packed_tile<2, VECS, W>(x, stride, packed, words, out);
        case 3: return packed_tile<3, VECS, W>(x, stride, packed, words, out);
        case 4: return packed_tile<4, VECS, W>(x, stride, packed, words, out);
        case 5: return packed_tile<5, VECS, W>(x, stride, packed, words, out);
        case 6: return packed_tile<6, VECS, W>(x, stride, packed, words, out);
    }
}

// VECS vectors of columns from n on, shared between the parts.
template <int VECS, class X, class W, class Put>
inline void packed_columns(const Product<X, W>& product, int64_t n, int64_t last, std::vector<uint32_t>& buffer, Put put) {
    const int64_t words = product.size * int64_t(sizeof(W)) / 4, whole = words / 16 * 16;
    const int per_part = VECS / product.parts;
    buffer.resize(words * VECS * 16);
    for (int v = 0; v < VECS; v++) {
        const uint32_t* rows[16];
        for (int i = 0; i < 16; i++)
            rows[i] = reinterpret_cast<const uint32_t*>(product.row_of(v / per_part, n + v % per_part * 16 + i));
        for (int64_t at = 0; at < whole; at += 16) turn_words(rows, at, buffer.data() + (at * VECS + v) * 16, VECS * 16);
        for (int64_t at = whole; at < words; at++)
            for (int i = 0; i < 16; i++) buffer[(at * VECS + v) * 16 + i] = rows[i][at];
    }
    const int64_t tiles = (product.rows + kRows - 1) / kRows;
    const int count = int(std::min<int64_t>(per_part * 16, last - n));
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t begin = product.rows * tile / tiles, end = product.rows * (tile + 1) / tiles;
        const uint32_t* x = reinterpret_cast<const uint32_t*>(product.x + begin * product.size);
        float sums[kRows][kVectors * 16];
        any_packed_tile<VECS, W>(int(end - begin), x, words, buffer.data(), words, sums);
        for (int64_t row = begin; row < end; row++) {
            float* y[2] = {sums[row - begin], sums[row - begin] + per_part * 16};
            put(row, n, y, count);
        }
    }
}

template <class X, class W, class Put>
inline void pack_and_multiply(const Product<X, W>& product, Range range, Put put) {
    std::vector<uint32_t> buffer;
    const int64_t most = kVectors / product.parts * 16;
    for (int64_t n = range.first; n < range.last;) {
        const int64_t left = std::min(most, range.last - n);
        switch (product.parts * int((left + 15) / 16)) {
            case 1: packed_columns<1>(product, n, range.last, buffer, put); break;
            case 2: packed_columns<2>(product, n, range.last, buffer, put); break;
            case 3: packed_columns<3>(product, n, range.last, buffer, put); break;
            case 4: packed_columns<4>(product, n, range.last, buffer, put); break;
        }
        n += left;
    }
}

#endif

// Multiply by one thread's share of W's columns, in the way that suits the number of rows.
template <class X, class W, class Put>
inline void multiply(const Product<X, W>& product, int thread, int threads, int64_t packs_from, Put put) {
#if defined(__AVX512F__)
    if (product.rows >= packs_from && product.size * int64_t(sizeof(W)) % 4 == 0)
        return pack_and_multiply(product, Range(product.width, 16, thread, threads), put);
#endif
    stream(product, Range(product.width, kCols, thread, threads), put);
}

}  // namespace tailrace
