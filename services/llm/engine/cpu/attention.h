// Attention of a step's tiles over the pages of their contexts and then over the beams' tails, shared by threads.

#pragma once

#include "few_queries.h"
#include "many_queries.h"
#include "tasks.h"

namespace tailrace {

// What a thread keeps from tile to tile and from layer to layer.
template <class T>
struct Workspace {
    std::vector<Sums> sums;  // by group
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

template <class T>
inline void attend_chunk(const Queries<T>& queries, const Chunk<T>& chunk, TurnedChunk& turned, Sums& sums, Coming<T>& coming) {
#if defined(__AVX512F__)
    if (queries.count >= kManyQueries && queries.head_dim % 2 == 0) {
        coming.fetch_all();
        return attend_many(queries, chunk, turned, sums);
    }
#endif
    attend_few(queries, chunk, sums, coming);
}

// One thread's part of a layer's attention, task after task. What comes next, be it of the next task, is fetched meanwhile.
template <class T>
class Attention {
  public:
    // Takes the first task and has its beginning fetched, so best made a while before `run`.
    Attention(const Pages<T>& pages, const TailPlaces<T>& tails, Tasks tasks, int64_t num_heads, Workspace<T>& space)
        : pages_(pages), tails_(tails), tasks_(tasks), num_heads_(num_heads), per_group_(num_heads / pages.num_groups), space_(space),
          task_(tasks_.take()) {
        if (task_.tile == nullptr) return;
        chunk_->fill(pages_, *task_.tile, task_.first_group, 0);
        Coming<T>(*chunk_, task_.num_groups, pages_.head_dim, 1).fetch_all();
    }

    Attention(const Attention&) = delete;

    // q (T, H, K) -> out (T, H, K), the rows and heads of this thread's tasks.
    void run(const T* q, T* out) {
        while (task_.tile != nullptr) {
            const Task next = tasks_.take();
            gather(q);
            attend_pages(next);
            finish(out);
            task_ = next;
        }
    }

  private:
    int64_t count() const { return task_.tile->num_rows * per_group_; }

    int64_t place_of(int64_t group, int64_t i) const {
        const int64_t row = task_.tile->first_row + i / per_group_, head = (task_.first_group + group) * per_group_ + i % per_group_;
        return (row * num_heads_ + head) * pages_.head_dim;
    }

    Queries<T> queries_of(int64_t group) const {
        const int64_t head_dim = pages_.head_dim;
        return {space_.queries.data() + group * count() * head_dim, count(), per_group_, head_dim, 1.0f / std::sqrt(float(head_dim)), *task_.tile};
    }

    void gather(const T* q) {
        const int64_t head_dim = pages_.head_dim;
        space_.sums.resize(std::max<size_t>(space_.sums.size(), task_.num_groups));
        space_.queries.resize(task_.num_groups * count() * head_dim);
        for (int64_t group = 0; group < task_.num_groups; group++) {
            space_.sums[group].begin(count(), head_dim);
            for (int64_t i = 0; i < count(); i++)
                std::copy_n(q + place_of(group, i), head_dim, space_.queries.data() + (group * count() + i) * head_dim);
        }
    }

    // Starts with `chunk_` the first one of the task and ends with it the first one of `next`.
    void attend_pages(const Task& next) {
        bool is_last = false;
        for (int64_t first = kChunk; !is_last; first += kChunk) {
            next_chunk_->fill(pages_, *task_.tile, task_.first_group, first);
            is_last = next_chunk_->count == 0;
            if (is_last && next.tile != nullptr) next_chunk_->fill(pages_, *next.tile, next.first_group, 0);
            Coming<T> coming(*next_chunk_, task_.num_groups, pages_.head_dim, task_.num_groups * fetches_of(queries_of(0), *chunk_));
            for (int64_t group = 0; group < task_.num_groups; group++) {
                attend_chunk(queries_of(group), *chunk_, space_.turned, space_.sums[group], coming);
                chunk_->go_to_next_head(pages_.head_dim);
            }
            std::swap(chunk_, next_chunk_);
        }
    }

    void finish(T* out) {
        const int64_t head_dim = pages_.head_dim;
        for (int64_t group = 0; group < task_.num_groups; group++) {
            Sums& sums = space_.sums[group];
            if (task_.tile->first_row >= tails_.first_row)
                attend_tails(queries_of(group), tails_, task_.first_group + group, pages_.num_groups, sums);
            for (int64_t i = 0; i < count(); i++) {
                const float* sum = sums.out.data() + i * sums.padded;
                T* to = out + place_of(group, i);
                const float inverse = 1.0f / sums.total[i];
                int64_t k = 0;
                for (; k + kWidth <= head_dim; k += kWidth) store(to + k, load(sum + k) * inverse);
                for (; k < head_dim; k++) store_one(to + k, sum[k] * inverse);
            }
        }
    }

    const Pages<T> pages_;
    const TailPlaces<T> tails_;
    Tasks tasks_;
    const int64_t num_heads_, per_group_;
    Workspace<T>& space_;
    Task task_;
    Chunk<T> chunks_[2];
    Chunk<T> *chunk_ = &chunks_[0], *next_chunk_ = &chunks_[1];  // swapped, not copied
};

}  // namespace tailrace
