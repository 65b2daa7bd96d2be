// fp32 vectors as wide as the processor's registers, and conversions from and to the model's dtype.
//
// Written with GCC's vector extension, so that one source serves AVX-512, AVX2 and other instruction sets.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// One copy per type instead of one per caller: halves the build time.
#define TAILRACE_SHARED __attribute__((noinline))

namespace tailrace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif

typedef float Floats __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));
typedef uint8_t Octets __attribute__((vector_size(kWidth), aligned(1), may_alias));

struct Bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void store_one(float* to, float x) { *to = x; }
inline void store_one(Bf16* to, float x) {  // round to nearest even; NaN is not preserved
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline Floats load(const Bf16* from) {
    Words words = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16;
    return reinterpret_cast<Floats&>(words);
}

inline void store(float* to, Floats x) { *reinterpret_cast<Floats*>(to) = x; }
inline void store(Bf16* to, Floats x) {
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &halves, sizeof halves);
#else
    Words bits = reinterpret_cast<Words&>(x);
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector(bits, Halves);
#endif
}

inline Floats splat(float x) { return Floats{} + x; }

inline float sum_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < kWidth; i++) total += x[i];
    return total;
#endif
}

inline float max_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float peak = x[0];
    for (int i = 1; i < kWidth; i++) peak = x[i] > peak ? x[i] : peak;
    return peak;
#endif
}

inline Floats larger_of(Floats a, Floats b) { return a > b ? a : b; }

// e^x for x <= 88, to 2 units in the last place; about 0 below -87. Cody and Waite's reduction, Cephes' polynomial.
inline Floats exp_of(Floats x) {
    const Floats kRound = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to integers
    x = larger_of(x, splat(-110.0f));
    Floats n = (x * 1.44269504088896341f + kRound) - kRound;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < -87.0f ? Floats{} : p * reinterpret_cast<Floats&>(exponent);
#endif
}

// x / (1 + e^-x)
inline Floats silu(Floats x) {
    const Floats below = 1.0f + exp_of(-larger_of(x, splat(-87.0f)));
#if defined(__AVX512F__)
    const Floats guess = (Floats)_mm512_rcp14_ps((__m512)below);
    return x * (guess * (2.0f - below * guess));  // one Newton step
#else
    return x / below;
#endif
}

}  // namespace tailrace
