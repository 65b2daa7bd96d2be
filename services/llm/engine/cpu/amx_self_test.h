// Enables AMX: requests permission from the operating system, then compares a small product with the AVX-512 micro-kernel.

#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "amx.h"

namespace tailrace {

#if defined(TAILRACE_AMX)

inline void fill_with_noise(uint32_t* words, size_t count, int8_t) {
    for (size_t i = 0; i < count; i++) words[i] = uint32_t(i + 1) * 2654435761u;
}

inline void fill_with_noise(uint32_t* words, size_t count, Bf16) {
    Bf16* numbers = reinterpret_cast<Bf16*>(words);
    for (size_t i = 0; i < 2 * count; i++) store_one(numbers + i, float(int32_t(uint32_t(i + 1) * 2654435761u)) * 0x1p-31f);
}

// Shapes that use every tile, full and partial: 19 rows by 3 vectors of columns.
template <class W>
inline bool amx_self_test() {
    constexpr int kRowsTried = 19, kWords = 48, kVectorsTried = 3;
    constexpr float kTolerance = std::is_same_v<W, int8_t> ? 0.0f : 1e-4f;
    std::vector<Line> x(kRowsTried * kWords / 16), panel(kWords * kVectorsTried);
    fill_with_noise(x.data()->words, x.size() * 16, W{});
    fill_with_noise(panel.data()->words, panel.size() * 16, W{});
    float by_tiles[kRowsTried][kPanelWidth], by_vectors[kRowsTried][kPanelWidth];
    PrefetchRange prefetch = {nullptr, nullptr};
    amx_panel<W>(kRowsTried, x.data()->words, kWords, panel.data()->words, kVectorsTried, prefetch, by_tiles);
    release_tiles();
    for (int row = 0; row < kRowsTried; row++) {
        dispatch_panel_tile<kVectorsTried, W>(1, x.data()->words + row * kWords, kWords, panel.data()->words, prefetch, by_vectors + row);
        for (int n = 0; n < kVectorsTried * 16; n++)
            if (!(std::fabs(by_tiles[row][n] - by_vectors[row][n]) <= kTolerance)) return false;
    }
    return true;
}

inline Amx enable_amx() {
    if (!request_tile_permission()) return Amx::refused;
    amx_is_on = amx_self_test<Bf16>() && amx_self_test<int8_t>();
    return amx_is_on ? Amx::on : Amx::wrong;
}

#else

inline Amx enable_amx() { return Amx::absent; }

#endif

}  // namespace tailrace
