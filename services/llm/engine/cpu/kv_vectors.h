// Loads keys and values into AVX-512 registers: whole or masked vectors, and values as words to be multiplied by a word of weights (for
// bf16 a word holds one number of two keys' values).

#pragma once

#include "paged_context.h"
#include "micro_kernel.h"

namespace tailrace {

#if defined(__AVX512F__)

template <class T> constexpr int kLanes = 64 / int(sizeof(T));  // per vector
template <class T> constexpr int kKeysPerWord = 4 / int(sizeof(T));

// The first `count` numbers of a vector, the rest zero.
inline __m512i load_masked(const float* from, int64_t count) {
    return _mm512_castps_si512(_mm512_maskz_loadu_ps(__mmask16((1u << std::clamp<int64_t>(count, 0, 16)) - 1), from));
}
inline __m512i load_masked(const Bf16* from, int64_t count) {
    return _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << std::clamp<int64_t>(count, 0, 32)) - 1), from);
}
template <class T>
inline __m512i load_vector(const T* from) {
    return _mm512_loadu_si512(from);
}

// The kSlice numbers from `first` on of the values of key c (bf16: of keys c and c + 1) as words, in order. `fetch(from, offset)` loads one vector.
template <class Fetch>
inline void load_values(const Chunk<float>& chunk, int c, int64_t first, Fetch fetch, __m512i* words) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) words[v] = fetch(chunk.values[c] + first + v * 16, v * 16);
}
template <class Fetch>
inline void load_values(const Chunk<Bf16>& chunk, int c, int64_t first, Fetch fetch, __m512i* words) {
    const __m512i even = _mm512_cvtepu16_epi32(_mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m512i low = _mm512_add_epi16(_mm512_or_si512(even, _mm512_slli_epi32(even, 16)), _mm512_set1_epi32(32 << 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const __m512i a = fetch(chunk.values[c] + first + half * 32, half * 32), b = fetch(chunk.values[c + 1] + first + half * 32, half * 32);
        words[half * 2] = _mm512_permutex2var_epi16(a, low, b);
        words[half * 2 + 1] = _mm512_permutex2var_epi16(a, high, b);
    }
}

#endif

}  // namespace tailrace
