// y = x W^T by panels of W's rows: the matrices of layers are packed once (`pack_matrix`), others on the fly for many rows (prefill).
//
// Packing on the fly, a few percent of the work from about 64 rows on, goes to a buffer of the thread, one panel at a time; the next panel is
// prefetched meanwhile. 4-bit rows are unpacked to int8 before. AVX-512 only; without it gemv handles any number of rows.

#pragma once

#include <vector>

#include "amx.h"
#include "gemv.h"

namespace tailrace {

constexpr int64_t kAmxMinRows = 12;  // from this many rows packing W pays off with AMX

#if defined(__AVX512F__)

// Rows of a part in a panel.
inline int64_t panel_columns(int parts) { return kPanelWidth / parts; }

// The strips of the panel that begins at column n of each part of a packed matrix. All panels before it are whole.
template <class X, class W>
inline const uint32_t* packed_panel(const Product<X, W>& product, int64_t n, int64_t words) {
    return product.strips + n * product.parts * words;
}

// The part of the next panel that is prefetched during block `block` of `blocks` blocks of rows.
template <class X, class W>
inline PrefetchRange next_panel_range(const Product<X, W>& product, int64_t n, int64_t last, int64_t words, int64_t block, int64_t blocks) {
    if (product.strips) {
        const int64_t strips = (std::max<int64_t>(0, last - n) + 15) / 16 * product.parts, bytes = strips * words * 64;
        const char* from = reinterpret_cast<const char*>(packed_panel(product, n, words));
        return {from + bytes * block / blocks, from + bytes * (block + 1) / blocks};
    }
    const int64_t per_part = (blocks + product.parts - 1) / product.parts, step = block % per_part;
    const int64_t bytes = std::max<int64_t>(0, last - n) * product.stride() * int64_t(sizeof(W));
    const char* from = reinterpret_cast<const char*>(product.row_of(int(block / per_part), n));
    return {from + bytes * step / per_part, from + bytes * (step + 1) / per_part};
}

// The type that a matrix of W is multiplied as.
template <class W> using Multiplied = std::conditional_t<std::is_same_v<W, Int4>, int8_t, W>;

// A thread's packed panel, and the unpacked rows of 4-bit weights.
struct Panel {
    std::vector<Line> lines;
    std::vector<int8_t> unpacked;
};

// Row n of a part as words, unpacked as row i of the panel's if it is of 4-bit weights.
template <class X, class W>
inline const uint32_t* words_of(const Product<X, W>& product, int part, int64_t n, int i, Panel& panel) {
    if constexpr (std::is_same_v<W, Int4>) {
        panel.unpacked.resize(16 * product.size);
        int8_t* row = panel.unpacked.data() + i * product.size;
        unpack_row(product.row_of(part, n), product.multipliers_of(part, n), product.size, row);
        return reinterpret_cast<const uint32_t*>(row);
    } else {
        return reinterpret_cast<const uint32_t*>(product.row_of(part, n));
    }
}

// The strips of VECS vectors of columns from n on, part after part, packed into the thread's panel.
template <int VECS, class X, class W>
inline const uint32_t* pack_panel(const Product<X, W>& product, int64_t n, int64_t words, Panel& panel) {
    panel.lines.resize(words * VECS);
    for (int v = 0; v < VECS; v++) {
        const int per_part = VECS / product.parts;
        const uint32_t* rows[16];
        for (int i = 0; i < 16; i++) rows[i] = words_of(product, v / per_part, n + v % per_part * 16 + i, i, panel);
        pack_rows(rows, words, panel.lines[v * words].words);
    }
    return panel.lines.data()->words;
}

// VECS vectors of columns from n on, divided among the parts.
template <int VECS, class X, class W, class Put>
inline void gemm_columns(const Product<X, W>& product, int64_t n, int64_t last, Panel& panel, Put put) {
    const int64_t words = product.size * int64_t(sizeof(Multiplied<W>)) / 4, blocks = (product.rows + kPanelRows - 1) / kPanelRows;
    const int per_part = VECS / product.parts, count = int(std::min<int64_t>(per_part * 16, last - n));
    const uint32_t* strips = product.strips ? packed_panel(product, n, words) : pack_panel<VECS>(product, n, words, panel);
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t begin = block * kPanelRows, end = std::min(product.rows, begin + kPanelRows);
        const uint32_t* x = reinterpret_cast<const uint32_t*>(product.x + begin * product.size);
        alignas(64) float sums[kPanelRows][kPanelWidth];
        const int64_t next = n + per_part * 16, next_last = std::min(last, next + panel_columns(product.parts));
        multiply_panel<VECS, Multiplied<W>>(int(end - begin), x, words, strips, next_panel_range(product, next, next_last, words, block, blocks), sums);
        for (int64_t row = begin; row < end; row++) {
            float* y[2] = {sums[row - begin], sums[row - begin] + per_part * 16};
            put(row, n, y, count);
        }
    }
}

template <class X, class W, class Put>
inline void gemm(const Product<X, W>& product, Range range, Put put) {
    Panel panel;
    const int64_t max_columns = panel_columns(product.parts);
    for (int64_t n = range.first; n < range.last;) {
        const int64_t left = std::min(max_columns, range.last - n);
        switch (product.parts * int((left + 15) / 16)) {
            case 1: gemm_columns<1>(product, n, range.last, panel, put); break;
            case 2: gemm_columns<2>(product, n, range.last, panel, put); break;
            case 3: gemm_columns<3>(product, n, range.last, panel, put); break;
            case 4: gemm_columns<4>(product, n, range.last, panel, put); break;
        }
        n += left;
    }
}

// Pack a whole matrix of `parts` times `width` rows of `words` words for `gemm`: its panels' strips, with two parts the strips of each in turn.
inline void pack_matrix(const uint32_t* from, int parts, int64_t width, int64_t words, uint32_t* strip) {
    for (int64_t n = 0; n < width; n += panel_columns(parts))
        for (int part = 0; part < parts; part++)
            for (int64_t first = n; first < std::min(width, n + panel_columns(parts)); first += 16, strip += words * 16) {
                const uint32_t* rows[16];
                for (int64_t i = 0; i < 16; i++) rows[i] = from + (part * width + std::min(first + i, width - 1)) * words;
                pack_rows(rows, words, strip);
            }
}

#endif

// Multiply by one thread's share of W's columns: gemm or gemv, depending on the number of rows.
template <class X, class W, class Put>
inline void multiply(const Product<X, W>& product, int thread, int threads, int64_t gemm_min_rows, Put put) {
#if defined(__AVX512F__)
    const int64_t bytes = product.size * int64_t(sizeof(Multiplied<W>));
    const int64_t from = suits_amx<Multiplied<W>>(bytes / 4) ? std::min(gemm_min_rows, kAmxMinRows) : gemm_min_rows;
    if (product.strips || (product.rows >= from && bytes % 4 == 0))
        return gemm(product, Range(product.width, product.parts == 1 ? 16 : panel_columns(2), thread, threads), put);
#endif
    gemv(product, Range(product.width, kCols, thread, threads), put);
}

}  // namespace tailrace
