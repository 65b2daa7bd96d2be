// Operations on one row: products, RMS norm, rope, SiLU times gate, quantisation.

#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace tailrace {

template <class T>
inline float dot(const T* x, const T* y, int64_t size) {
    Floats products = {};
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) products += load(x + k) * load(y + k);
    float total = sum_of(products);
    for (; k < size; k++) total += to_float(x[k]) * to_float(y[k]);
    return total;
}

// out = out * shrink + x * weight
template <class T>
inline void scale_and_add(float* out, float shrink, const T* x, float weight, int64_t size) {
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) store(out + k, load(out + k) * shrink + load(x + k) * weight);
    for (; k < size; k++) out[k] = out[k] * shrink + to_float(x[k]) * weight;
}

// Root-mean-square norm (Zhang and Sennrich 2019).
template <class T, class To>
inline void rms_norm(const float* x, const T* weight, int64_t size, float eps, To* out) {
    Floats squares = {};
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) squares += load(x + k) * load(x + k);
    float total = sum_of(squares);
    for (int64_t rest = k; rest < size; rest++) total += x[rest] * x[rest];
    const float scale = 1.0f / std::sqrt(total / float(size) + eps);
    for (k = 0; k + kWidth <= size; k += kWidth) store(out + k, load(x + k) * scale * load(weight + k));
    for (; k < size; k++) store_one(out + k, x[k] * scale * to_float(weight[k]));
}

// Rotary positions in Llama's half-split layout: pair i is number i of the lower and of the upper half.
template <class To>
inline void rope(const float* x, const float* cosine, const float* sine, int64_t size, To* out) {
    const int64_t half = size / 2;
    for (int64_t pair = 0; pair < half; pair++) {
        const float low = x[pair], high = x[pair + half];
        store_one(out + pair, low * cosine[pair] - high * sine[pair]);
        store_one(out + pair + half, high * cosine[pair] + low * sine[pair]);
    }
}

template <class To>
inline void copy_row(const float* x, int64_t size, To* out) {
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) store(out + k, load(x + k));
    for (; k < size; k++) store_one(out + k, x[k]);
}

// out = silu(gate) * up
template <class To>
inline void silu_mul(const float* gate, const float* up, int64_t size, To* out) {
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) store(out + k, silu(load(gate + k)) * load(up + k));
    if (k == size) return;
    float rest[kWidth] = {};
    std::copy_n(gate + k, size - k, rest);
    store(rest, silu(load(rest)));
    for (int64_t i = 0; k + i < size; i++) store_one(out + k + i, rest[i] * up[k + i]);
}

// Quantise a row to unsigned bytes with offset 128, padded to `padded`. Returns the scale.
template <class T>
inline float quantise(const T* x, int64_t size, int64_t padded, uint8_t* out) {
    Floats top = {};
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) top = larger_of(top, larger_of(load(x + k), -load(x + k)));
    float peak = max_of(top);
    for (int64_t rest = k; rest < size; rest++) peak = std::max(peak, std::fabs(to_float(x[rest])));
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    for (k = 0; k + kWidth <= size; k += kWidth) {
        const Ints whole = __builtin_convertvector(load(x + k) * inverse + 128.5f, Ints);  // positive, so truncation rounds
        *reinterpret_cast<Octets*>(out + k) = __builtin_convertvector(whole, Octets);
    }
    for (; k < size; k++) out[k] = uint8_t(to_float(x[k]) * inverse + 128.5f);
    for (; k < padded; k++) out[k] = 128;
    return peak / 127.0f;
}

// Convert the integer sums to fp32: subtract the offset of 128 times W's row sums, then scale.
inline void dequantise(float* y, const int32_t* sums, const float* scales, float scale, int64_t size) {
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) {
        const Floats offset = __builtin_convertvector(*reinterpret_cast<const Ints*>(sums + k), Floats) * 128.0f;
        store(y + k, (load(y + k) - offset) * (load(scales + k) * scale));
    }
    for (; k < size; k++) y[k] = (y[k] - 128.0f * float(sums[k])) * (scales[k] * scale);
}

}  // namespace tailrace
