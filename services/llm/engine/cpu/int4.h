// 4-bit weights: codes of -7 to 7 in groups of 32 along the input, each group with a whole multiplier, each row with one scale.
//
// A code times its multiplier fits int8, so unpacking is a lookup, and all that follows is the int8 path: the same instructions, row sums
// and row scales. The scheme is QServe's progressive quantisation (Lin et al. 2024, arXiv:2405.04532), here symmetric.

#pragma once

#include "simd.h"

namespace tailrace {

constexpr int kMaxMultiplier = 18;  // 7 * 18 = 126
constexpr int64_t kBlockWeights = 64;

// Two weights. A block of 64 weights is 32 of these: the low halves are the codes of one group, plus 8, the high halves those of the next.
struct Int4 {
    uint8_t codes;
};

// The 16 products of each multiplier, by code plus 8; a code of 0 is not used.
struct Products {
    alignas(64) int8_t of[kMaxMultiplier + 1][16] = {};
    constexpr Products() {
        for (int multiplier = 0; multiplier <= kMaxMultiplier; multiplier++)
            for (int code = 1; code < 16; code++) of[multiplier][code] = int8_t((code - 8) * multiplier);
    }
};
static constexpr Products kProducts;

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
inline __m512i unpack_block(const Int4* block, const uint8_t* multipliers) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(packed), _mm256_srli_epi16(packed, 4), 1);
    const auto products = [](uint8_t multiplier) { return _mm_load_si128(reinterpret_cast<const __m128i*>(kProducts.of[multiplier])); };
    const __m512i low = _mm512_broadcast_i32x4(products(multipliers[0]));
    const __m512i table = _mm512_mask_broadcast_i32x4(low, 0xFF00, products(multipliers[1]));
    return _mm512_shuffle_epi8(table, _mm512_and_si512(both, _mm512_set1_epi8(15)));
}
inline void unpack_block(const Int4* block, const uint8_t* multipliers, int8_t* out) {
    _mm512_storeu_si512(out, unpack_block(block, multipliers));
}
#else
inline void unpack_block(const Int4* block, const uint8_t* multipliers, int8_t* out) {
    const int low = multipliers[0], high = multipliers[1];
    for (int i = 0; i < 32; i++) {
        out[i] = int8_t((int(block[i].codes & 15) - 8) * low);
        out[32 + i] = int8_t((int(block[i].codes >> 4) - 8) * high);
    }
}
#endif

// Unpack a row of `size` weights, a multiple of 64.
inline void unpack_row(const Int4* row, const uint8_t* multipliers, int64_t size, int8_t* out) {
    for (int64_t k = 0; k < size; k += kBlockWeights) unpack_block(row + k / 2, multipliers + k / 32, out + k);
}

}  // namespace tailrace
