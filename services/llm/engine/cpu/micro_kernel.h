// The gemm micro-kernel: rows of x times a packed panel, a few columns of a matrix laid out so that a lane is a column.
//
// A strip is 16 columns, (words, 16) words of 32 bits, each one fp32, two bf16 or four int8 that are adjacent in a column: what AVX-512
// multiplies by a word of x, and the layout of AMX's right operand. A panel is up to kVectors strips, one after the other. AVX-512 only.

#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace tailrace {

constexpr int kVectors = 4;
constexpr int kPanelWidth = kVectors * 16;
constexpr int kTileRows = 6;    // of AVX-512: their sums fit its registers
constexpr int kPanelRows = 32;  // the most rows per call

// 16 words of a panel, aligned for vector loads.
struct alignas(64) Line {
    uint32_t words[16];
};

// Memory that will be read next, to be prefetched into the L2 cache, some lines with each word.
struct PrefetchRange {
    const char *next, *end;
    int lines_per_word = 1;
};

#if defined(__AVX512F__)

// Transpose 16 rows of 16 words into 16 vectors, each of one word of all rows.
TAILRACE_SHARED inline void transpose_words(const uint32_t* const* rows, int64_t at, uint32_t* out) {
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
        _mm512_storeu_si512(out + i * 16, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(out + (4 + i) * 16, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(out + (8 + i) * 16, _mm512_shuffle_i32x4(low, low2, 0xDD));
        _mm512_storeu_si512(out + (12 + i) * 16, _mm512_shuffle_i32x4(high, high2, 0xDD));
    }
}

// Pack 16 rows of `words` words into a strip.
inline void pack_rows(const uint32_t* const* rows, int64_t words, uint32_t* strip) {
    const int64_t whole = words / 16 * 16;
    for (int64_t at = 0; at < whole; at += 16) transpose_words(rows, at, strip + at * 16);
    for (int64_t at = whole; at < words; at++)
        for (int i = 0; i < 16; i++) strip[at * 16 + i] = rows[i][at];
}

inline __m512 add_products(__m512 sum, __m512i x, __m512i w, float) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum);
}
inline __m512 to_floats(__m512 sum) { return sum; }

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
inline __m512i add_products(__m512i sum, __m512i x, __m512i w, int8_t) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));  // with the intrinsic GCC 12 keeps the sums in memory
    return sum;
}
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
inline __m512 to_floats(__m512i sum) { return _mm512_cvtepi32_ps(sum); }

template <class W> struct SumOf { using type = __m512; };
template <> struct SumOf<int8_t> { using type = __m512i; };

// Words that are summed in one register before the run is added to the result. Short runs keep the rounding error of long fp32 rows small;
// bf16 products are rounded far more than their sum, and integers not at all.
template <class W> constexpr int64_t kRun = std::is_same_v<W, float> ? 64 : INT64_MAX;

template <int ROWS, int VECS, class W>
inline void panel_tile(const uint32_t* x, int64_t words, const uint32_t* panel, PrefetchRange& prefetch, float (*out)[kPanelWidth]) {
    const char* fetched = prefetch.next;
    for (int64_t k = 0; k < words;) {
        const int64_t first = k, last = std::min(words - first, kRun<W>) + first;
        typename SumOf<W>::type sum[ROWS][VECS];
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[m][v] = typename SumOf<W>::type{};
        for (; k < last; k++) {
            for (int line = 0; line < prefetch.lines_per_word; line++) {
                _mm_prefetch(fetched, _MM_HINT_T1);
                fetched += fetched < prefetch.end ? 64 : 0;
            }
            __m512i column[VECS];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) column[v] = _mm512_loadu_si512(panel + (v * words + k) * 16);
#pragma GCC unroll 6
            for (int m = 0; m < ROWS; m++) {
                const __m512i word = _mm512_set1_epi32(int32_t(x[m * words + k]));
#pragma GCC unroll 4
                for (int v = 0; v < VECS; v++) sum[m][v] = add_products(sum[m][v], word, column[v], W{});
            }
        }
#pragma GCC unroll 6
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) {
                const __m512 run = to_floats(sum[m][v]);
                _mm512_storeu_ps(out[m] + v * 16, first == 0 ? run : _mm512_add_ps(_mm512_loadu_ps(out[m] + v * 16), run));
            }
    }
    prefetch.next = fetched;
}

template <int VECS, class W>
TAILRACE_SHARED inline void dispatch_panel_tile(int rows, const uint32_t* x, int64_t words, const uint32_t* panel, PrefetchRange& prefetch, float (*out)[kPanelWidth]) {
    switch (rows) {
        case 1: return panel_tile<1, VECS, W>(x, words, panel, prefetch, out);
        case 2: return panel_tile<2, VECS, W>(x, words, panel, prefetch, out);
        case 3: return panel_tile<3, VECS, W>(x, words, panel, prefetch, out);
        case 4: return panel_tile<4, VECS, W>(x, words, panel, prefetch, out);
        case 5: return panel_tile<5, VECS, W>(x, words, panel, prefetch, out);
        case 6: return panel_tile<6, VECS, W>(x, words, panel, prefetch, out);
    }
}

#endif

}  // namespace tailrace
