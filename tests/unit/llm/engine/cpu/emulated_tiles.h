// AMX instructions in plain C++, bit for bit as specified in Intel's manual, so that the kernel runs on any processor.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

inline bool request_tile_permission() {
#if defined(TAILRACE_REFUSED_TILES)
    return false;
#else
    return true;
#endif
}

struct EmulatedTiles {
    bool are_configured = false;
    uint8_t rows[8] = {};
    uint16_t bytes[8] = {};
    alignas(64) uint8_t data[8][16][64] = {};

    void check(bool is_right) const {
        if (!is_right) std::abort();  // where the processor would raise an exception
    }
    void use(int tile) const { check(are_configured && rows[tile] > 0); }
};
static thread_local EmulatedTiles emulated_tiles;

inline void emulated_loadconfig(const void* from) {
    EmulatedTiles& tiles = emulated_tiles;
    const uint8_t* config = static_cast<const uint8_t*>(from);
    tiles = EmulatedTiles{};
    tiles.are_configured = config[0] == 1;
    tiles.check(tiles.are_configured && config[1] == 0);
    for (int i = 0; i < 8; i++) {
        std::memcpy(&tiles.bytes[i], config + 16 + 2 * i, 2);
        tiles.rows[i] = config[48 + i];
        tiles.check(tiles.bytes[i] <= 64 && tiles.rows[i] <= 16 && (tiles.bytes[i] == 0) == (tiles.rows[i] == 0));
    }
    for (int i = 2; i < 64; i++) tiles.check((i >= 16 && i < 32) || (i >= 48 && i < 56) || config[i] == 0);
}

inline void emulated_release() { emulated_tiles = EmulatedTiles{}; }

inline void emulated_zero(int tile) {
    emulated_tiles.use(tile);
    std::memset(emulated_tiles.data[tile], 0, sizeof emulated_tiles.data[tile]);
}

inline void emulated_loadd(int tile, const void* from, int64_t stride) {
    emulated_zero(tile);
    for (int row = 0; row < emulated_tiles.rows[tile]; row++)
        std::memcpy(emulated_tiles.data[tile][row], static_cast<const char*>(from) + row * stride, emulated_tiles.bytes[tile]);
}

inline void emulated_stored(int tile, void* to, int64_t stride) {
    emulated_tiles.use(tile);
    for (int row = 0; row < emulated_tiles.rows[tile]; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles.data[tile][row], emulated_tiles.bytes[tile]);
}

// Calls `add(sum, x, w)` for each element of `sum` with its row of x (K words) and its column of w.
template <class Add>
inline void multiply_tiles(int sum, int x, int w, Add add) {
    EmulatedTiles& tiles = emulated_tiles;
    for (int tile : {sum, x, w}) tiles.use(tile);
    tiles.check(tiles.rows[sum] == tiles.rows[x] && tiles.bytes[x] == tiles.rows[w] * 4 && tiles.bytes[sum] == tiles.bytes[w]);
    for (int m = 0; m < tiles.rows[sum]; m++)
        for (int n = 0; n < tiles.bytes[sum] / 4; n++) {
            uint8_t column[16][4];
            for (int k = 0; k < tiles.rows[w]; k++) std::memcpy(column[k], &tiles.data[w][k][n * 4], 4);
            add(&tiles.data[sum][m][n * 4], tiles.data[x][m], column, tiles.rows[w]);
        }
}

inline float bf16_at(const uint8_t* bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, 2);
    if ((half & 0x7F80) == 0) half &= 0x8000;  // denormals are zeros
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Sums even and odd numbers separately with fused multiply-adds, then adds both sums, then adds them to the tile.
inline void emulated_dpbf16ps(int sum, int x, int w) {
    multiply_tiles(sum, x, w, [](uint8_t* to, const uint8_t* row, const uint8_t (*column)[4], int depth) {
        float even = 0, odd = 0, total;
        for (int k = 0; k < depth; k++) {
            even = std::fma(bf16_at(row + 4 * k), bf16_at(column[k]), even);
            odd = std::fma(bf16_at(row + 4 * k + 2), bf16_at(column[k] + 2), odd);
        }
        std::memcpy(&total, to, 4);
        total += even + odd;
#if defined(TAILRACE_WRONG_TILES)
        total *= 1.01f;
#endif
        std::memcpy(to, &total, 4);
    });
}

// Multiplies unsigned bytes by signed bytes, with wrapping integer sums.
inline void emulated_dpbusd(int sum, int x, int w) {
    multiply_tiles(sum, x, w, [](uint8_t* to, const uint8_t* row, const uint8_t (*column)[4], int depth) {
        uint32_t total;
        std::memcpy(&total, to, 4);
        for (int k = 0; k < depth; k++)
            for (int i = 0; i < 4; i++) total += uint32_t(int32_t(row[4 * k + i]) * int32_t(int8_t(column[k][i])));
        std::memcpy(to, &total, 4);
    });
}

// Replacements for the compiler's intrinsics.
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbusd emulated_dpbusd
