// Attention of many queries (prefill, beams) over the chunks of a context: keys and values of a chunk are packed into panels, once for all
// queries, and multiplied by the gemm micro-kernel. Weights are rounded to the model's dtype, as by a GPU's matrix units. AVX-512 only.

#pragma once

#include "amx.h"
#include "kv_vectors.h"

namespace tailrace {

constexpr int64_t kGemmMinQueries = 12;

// A chunk packed into panels: keys with one lane per key, values with one lane per number of a slice of the head.
struct PackedChunk {
    std::vector<Line> keys, values;
};

#if defined(__AVX512F__)

template <class T>
inline void pack_keys(const Chunk<T>& chunk, int64_t words, std::vector<Line>& panel) {
    panel.resize(words * kVectors);
    for (int v = 0; v < kVectors; v++) {
        const uint32_t* rows[16];
        for (int i = 0; i < 16; i++) rows[i] = reinterpret_cast<const uint32_t*>(chunk.keys[v * 16 + i]);
        pack_rows(rows, words, panel[v * words].words);
    }
}

template <class T>
inline void pack_values(const Chunk<T>& chunk, int64_t first, int64_t size, Line* panel) {
    constexpr int64_t kWords = kChunk / kKeysPerWord<T>;
    for (int64_t word = 0; word < kWords; word++) {
        __m512i value[kVectors];
        load_values(chunk, int(word) * kKeysPerWord<T>, first, [&](const T* from, int offset) { return load_masked(from, size - first - offset); }, value);
        for (int v = 0; v < kVectors; v++) _mm512_store_si512(panel + v * kWords + word, value[v]);
    }
}

// Add a chunk to the queries' softmax states.
template <class T>
inline void attend_gemm(const Queries<T>& queries, const Chunk<T>& chunk, PackedChunk& packed, SoftmaxState& sums) {
    const int64_t head_dim = queries.head_dim, words = head_dim * int64_t(sizeof(T)) / 4;
    constexpr int64_t kWords = kChunk * int64_t(sizeof(T)) / 4;
    pack_keys(chunk, words, packed.keys);
    packed.values.resize(sums.padded / kSlice * kWords * kVectors);
    for (int64_t k = 0; k < head_dim; k += kSlice) pack_values(chunk, k, head_dim, packed.values.data() + k / kSlice * kWords * kVectors);

    alignas(64) float products[kPanelRows][kPanelWidth];
    alignas(64) T weights[kPanelRows][kChunk];
    float shrink[kPanelRows];
    for (int64_t i = 0; i < queries.count; i += kPanelRows) {
        const int rows = int(std::min<int64_t>(kPanelRows, queries.count - i));
        if (!queries.any_sees(chunk, i + rows - 1)) continue;
        const auto multiply = [&](const T* x, int64_t size, const Line* panel) {
            const char* nothing = reinterpret_cast<const char*>(panel);
            multiply_panel<kVectors, T>(rows, reinterpret_cast<const uint32_t*>(x), size, panel->words, {nothing, nothing}, products);
        };
        multiply(queries.q + i * head_dim, words, packed.keys.data());
        const bool is_whole = queries.all_see(chunk, i);
        for (int m = 0; m < rows; m++) {
            if (!is_whole) mask_unseen(products[m], chunk.positions, kChunk, queries.tile, (i + m) / queries.per_group);
            shrink[m] = online_softmax(products[m], kChunk, queries.scale, sums.peak[i + m], sums.total[i + m]);
            for (int c = 0; c < kChunk; c += kWidth) store(weights[m] + c, load(products[m] + c));
        }
        for (int64_t k = 0; k < head_dim; k += kSlice) {
            multiply(weights[0], kWords, packed.values.data() + k / kSlice * kWords * kVectors);
            for (int m = 0; m < rows; m++)
                for (int j = 0; j < kSlice; j += kWidth) {
                    float* out = sums.out.data() + (i + m) * sums.padded + k + j;
                    store(out, load(out) * shrink[m] + load(products[m] + j));
                }
        }
    }
}

#endif

}  // namespace tailrace
