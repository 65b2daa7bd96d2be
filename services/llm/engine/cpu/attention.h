// Attention of one tile's rows, for one key/value head, over the pages of its context and then over the beams' tails.

#pragma once

#include "few_queries.h"
#include "many_queries.h"

namespace tailrace {

// What a thread keeps from tile to tile.
template <class T>
struct Workspace {
    Sums sums;
    std::vector<T> queries;
    TurnedChunk turned;
};

template <class T>
inline void attend_tails(const Queries<T>& queries, const TailPlaces<T>& tails, int64_t group, int64_t num_groups, Sums& sums) {
    const int64_t head_dim = queries.head_dim;
    const T* q = queries.q;
    for (int64_t i = 0; i < queries.count; i++) {
        const int64_t beam = queries.tile.first_row + i / queries.per_group - tails.first_row;
        for (int64_t place = 0; place < tails.num_places; place++) {
            const int64_t at = beam * tails.num_places + place;
            if (!tails.seen[at]) continue;
            const T* key = tails.keys + (at * num_groups + group) * head_dim;
            const T* value = tails.values + (at * num_groups + group) * head_dim;
            float score = 0, *out = sums.out.data() + i * sums.padded;
            for (int64_t k = 0; k < head_dim; k++) score += to_float(q[i * head_dim + k]) * to_float(key[k]);
            const float peak = std::max(sums.peak[i], score);
            const float shrink = std::exp((sums.peak[i] - peak) * queries.scale), share = std::exp((score - peak) * queries.scale);
            for (int64_t k = 0; k < head_dim; k++) out[k] = out[k] * shrink + share * to_float(value[k]);
            sums.total[i] = sums.total[i] * shrink + share;
            sums.peak[i] = peak;
        }
    }
}

// q (T, H, K) -> out (T, H, K), the tile's rows and the group's heads of both.
template <class T>
inline void attend(
    const T* q, const Pages<T>& pages, const TailPlaces<T>* tails, const Tile& tile, int64_t group, int64_t num_heads,
    Workspace<T>& space, T* out
) {
    const int64_t head_dim = pages.head_dim, per_group = num_heads / pages.num_groups, count = tile.num_rows * per_group;
    const auto place_of = [&](int64_t i) {
        return ((tile.first_row + i / per_group) * num_heads + group * per_group + i % per_group) * head_dim;
    };
    space.sums.begin(count, head_dim);
    space.queries.resize(count * head_dim);
    for (int64_t i = 0; i < count; i++) std::copy_n(q + place_of(i), head_dim, space.queries.data() + i * head_dim);
    const Queries<T> queries = {space.queries.data(), count, per_group, head_dim, 1.0f / std::sqrt(float(head_dim)), tile};

    Chunk<T> chunk;
    for (int64_t first = 0; first < tile.num_blocks * pages.block_tokens; first += kChunk) {
        chunk.fill(pages, tile, group, first);
        if (chunk.count == 0) break;
#if defined(__AVX512F__)
        if (count >= kManyQueries && head_dim % 2 == 0) {
            attend_many(queries, chunk, space.turned, space.sums);
            continue;
        }
#endif
        attend_few(queries, chunk, space.sums);
    }
    if (tails != nullptr && tile.first_row >= tails->first_row) attend_tails(queries, *tails, group, pages.num_groups, space.sums);
    for (int64_t i = 0; i < count; i++) {
        const float* sum = space.sums.out.data() + i * space.sums.padded;
        const float inverse = 1.0f / space.sums.total[i];
        for (int64_t k = 0; k < head_dim; k++) store_one(out + place_of(i) + k, sum[k] * inverse);
    }
}

}  // namespace tailrace
