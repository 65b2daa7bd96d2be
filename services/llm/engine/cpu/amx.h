// The micro-kernel with AMX, the tile registers of newer Intel processors: five to ten times the throughput of their AVX-512.
//
// The packed panel is the right operand without conversion, rows of x are the left: two tiles of 16 rows by two of 16 columns. An
// operating system or a sandbox may refuse the registers, so `enable_amx` requests them once and runs a self-test. Absent if the
// compiler does not support AMX. Tests replace the instructions by an emulation (TAILRACE_EMULATED_TILES).

#pragma once

#include "micro_kernel.h"

#if defined(TAILRACE_EMULATED_TILES)
#include TAILRACE_EMULATED_TILES
#define TAILRACE_AMX
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TAILRACE_AMX
inline bool request_tile_permission() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM; the kernel's Documentation/arch/x86/xstate.rst
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

namespace tailrace {

enum class Amx : int32_t { absent, on, refused, wrong };

#if defined(TAILRACE_AMX)

static bool amx_is_on = false;  // static: an inline variable would be shared by all libraries in the process

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // per row
    uint8_t rows[16] = {};
};

static thread_local int configured_rows = 0;

// GCC's tile intrinsics do not declare the memory that they read; this keeps earlier stores before them.
inline void tile_load_fence(const void* from) { asm volatile("" : : "r"(from) : "memory"); }

// Tiles 0 to 3 are sums, 4 and 5 the upper and lower rows of x, 6 and 7 columns. A thread keeps its configuration until the number of rows changes.
inline void configure_tiles(int rows) {
    if (rows == configured_rows) return;
    TileConfig shapes;
    for (int tile = 0; tile < 8; tile++) {
        const bool is_lower = tile == 2 || tile == 3 || tile == 5;
        shapes.rows[tile] = uint8_t(tile >= 6 ? 16 : is_lower ? std::max(rows - 16, 1) : std::min(rows, 16));
        shapes.bytes[tile] = 64;
    }
    tile_load_fence(&shapes);
    _tile_loadconfig(&shapes);
    configured_rows = rows;
}

// Threads release the registers after each parallel region; otherwise each context switch would save 8 KB.
inline void release_tiles() {
    if (configured_rows > 0) _tile_release();
    configured_rows = 0;
}

#define TAILRACE_ADD_TILES(W, sum, x, w) \
    if constexpr (std::is_same_v<W, int8_t>) _tile_dpbusd(sum, x, w); \
    else _tile_dpbf16ps(sum, x, w);

// One strip or, with PAIR, two; with LOWER also rows 16 to 31.
template <class W, bool PAIR, bool LOWER>
inline void amx_tiles(const uint32_t* x, int64_t words, const uint32_t* strip, PrefetchRange& prefetch, float* out) {
    _tile_zero(0);
    if constexpr (PAIR) _tile_zero(1);
    if constexpr (LOWER) _tile_zero(2);
    if constexpr (PAIR && LOWER) _tile_zero(3);
    for (int64_t k = 0; k < words; k += 16) {
        for (int line = 0; line < 16 * prefetch.lines_per_word && prefetch.next < prefetch.end; line++, prefetch.next += 64)
            _mm_prefetch(prefetch.next, _MM_HINT_T1);
        _tile_loadd(4, x + k, words * 4);
        _tile_loadd(6, strip + k * 16, 64);
        TAILRACE_ADD_TILES(W, 0, 4, 6)
        if constexpr (PAIR) {
            _tile_loadd(7, strip + (words + k) * 16, 64);
            TAILRACE_ADD_TILES(W, 1, 4, 7)
        }
        if constexpr (LOWER) {
            _tile_loadd(5, x + 16 * words + k, words * 4);
            TAILRACE_ADD_TILES(W, 2, 5, 6)
        }
        if constexpr (PAIR && LOWER) TAILRACE_ADD_TILES(W, 3, 5, 7)
    }
    constexpr int kStride = kPanelWidth * 4;
    _tile_stored(0, out, kStride);
    if constexpr (PAIR) _tile_stored(1, out + 16, kStride);
    if constexpr (LOWER) _tile_stored(2, out + 16 * kPanelWidth, kStride);
    if constexpr (PAIR && LOWER) _tile_stored(3, out + 16 * kPanelWidth + 16, kStride);
}

template <class W>
TAILRACE_SHARED inline void amx_panel(
    int rows, const uint32_t* x, int64_t words, const uint32_t* panel, int vectors, PrefetchRange& prefetch, float (*out)[kPanelWidth]
) {
    configure_tiles(rows);
    tile_load_fence(x);
    for (int v = 0; v < vectors; v += 2) {
        const bool is_pair = v + 1 < vectors;
        const auto tiles = rows > 16 ? (is_pair ? amx_tiles<W, true, true> : amx_tiles<W, false, true>)
                                     : (is_pair ? amx_tiles<W, true, false> : amx_tiles<W, false, false>);
        tiles(x, words, panel + v * words * 16, prefetch, out[0] + v * 16);
    }
    if constexpr (std::is_same_v<W, int8_t>)
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < vectors; v++)
                _mm512_storeu_ps(out[m] + v * 16, _mm512_cvtepi32_ps(_mm512_loadu_si512(out[m] + v * 16)));
}

#else

constexpr bool amx_is_on = false;
inline void release_tiles() {}

#endif

// AMX has no fp32, and its tiles are 16 words deep.
template <class W>
inline bool suits_amx(int64_t words) {
    return amx_is_on && !std::is_same_v<W, float> && words % 16 == 0;
}

#if defined(__AVX512F__)

// out = x times the panel, for up to kPanelRows rows of x.
template <int VECS, class W>
inline void multiply_panel(int rows, const uint32_t* x, int64_t words, const uint32_t* panel, PrefetchRange prefetch, float (*out)[kPanelWidth]) {
#if defined(TAILRACE_AMX)
    if constexpr (!std::is_same_v<W, float>)
        if (suits_amx<W>(words)) return amx_panel<W>(rows, x, words, panel, VECS, prefetch, out);
#endif
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    prefetch.lines_per_word = int((prefetch.end - prefetch.next + 64 * words * tiles - 1) / (64 * words * tiles));
    for (int tile = 0; tile < tiles; tile++) {
        const int begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
        dispatch_panel_tile<VECS, W>(end - begin, x + begin * words, words, panel, prefetch, out + begin);
    }
}

#endif

}  // namespace tailrace
