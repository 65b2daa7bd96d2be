// Attention of a step's tiles over their paged contexts and then over the beams' tails, distributed over threads.

#pragma once

#include <atomic>

#include "attention_gemm.h"
#include "attention_gemv.h"
#include "row_ops.h"

namespace tailrace {

constexpr int64_t kMinTilesPerThread = 4;  // with at least this many a task is all heads of a tile

// A tile and a range of its key/value heads; a null tile ends the queue.
struct AttentionTask {
    const Tile* tile;
    int64_t first_kv_head, num_kv_heads;
};

// The work queue of a layer, shared by all threads through an atomic counter. With enough tiles a task is all heads of a tile, whose keys are
// adjacent in memory; otherwise a single head.
class TaskQueue {
  public:
    TaskQueue(const Tile* tiles, int64_t num_tiles, int64_t num_kv_heads, int threads, std::atomic<int64_t>& taken)
        : tiles_(tiles), run_(num_tiles >= kMinTilesPerThread * threads ? num_kv_heads : 1), runs_(num_kv_heads / run_), count_(num_tiles * runs_),
          taken_(taken) {}

    AttentionTask take() {
        const int64_t index = taken_.fetch_add(1, std::memory_order_relaxed);
        if (index >= count_) return {nullptr, 0, 0};
        return {tiles_ + index / runs_, index % runs_ * run_, run_};
    }

  private:
    const Tile* tiles_;
    int64_t run_, runs_, count_;
    std::atomic<int64_t>& taken_;
};

// Buffers that a thread reuses from tile to tile and from layer to layer.
template <class T>
struct Workspace {
    std::vector<SoftmaxState> sums;  // by key/value head of the task
    std::vector<T> queries;
    PackedChunk packed;
};

template <class T>
inline void attend_tails(const Queries<T>& queries, const TailPlaces<T>& tails, int64_t kv_head, int64_t num_kv_heads, SoftmaxState& sums) {
    const int64_t head_dim = queries.head_dim;
    const T* q = queries.q;
    for (int64_t i = 0; i < queries.count; i++) {
        const int64_t beam = queries.tile.first_row + i / queries.per_group - tails.first_row;
        for (int64_t place = 0; place < tails.num_places; place++) {
            const int64_t at = beam * tails.num_places + place;
            if (!tails.seen[at]) continue;
            const T* key = tails.keys + (at * num_kv_heads + kv_head) * head_dim;
            const T* value = tails.values + (at * num_kv_heads + kv_head) * head_dim;
            float* out = sums.out.data() + i * sums.padded;
            const float score = dot(q + i * head_dim, key, head_dim);
            const float peak = std::max(sums.peak[i], score);
            const float shrink = std::exp((sums.peak[i] - peak) * queries.scale), weight = std::exp((score - peak) * queries.scale);
            scale_and_add(out, shrink, value, weight, head_dim);
            sums.total[i] = sums.total[i] * shrink + weight;
            sums.peak[i] = peak;
        }
    }
}

template <class T>
inline void attend_chunk(const Queries<T>& queries, const Chunk<T>& chunk, PackedChunk& packed, SoftmaxState& sums, Prefetcher<T>& prefetcher) {
#if defined(__AVX512F__)
    if (queries.count >= kGemmMinQueries && queries.head_dim % 2 == 0) {
        prefetcher.fetch_all();
        return attend_gemm(queries, chunk, packed, sums);
    }
#endif
    attend_gemv(queries, chunk, sums, prefetcher);
}

// One thread's part of a layer's attention, task after task. The next chunk, which may belong to the next task, is prefetched.
template <class T>
class Attention {
  public:
    // Takes the first task and prefetches its first chunk: construct it some time before `run`.
    Attention(const Pages<T>& pages, const TailPlaces<T>& tails, TaskQueue tasks, int64_t num_heads, Workspace<T>& space)
        : pages_(pages), tails_(tails), tasks_(tasks), num_heads_(num_heads), per_group_(num_heads / pages.num_kv_heads), space_(space),
          task_(tasks_.take()) {
        if (task_.tile == nullptr) return;
        chunk_->fill(pages_, *task_.tile, task_.first_kv_head, 0);
        Prefetcher<T>(*chunk_, task_.num_kv_heads, pages_.head_dim, 1).fetch_all();
    }

    Attention(const Attention&) = delete;

    // q (T, H, K) -> out (T, H, K), for the rows and heads of this thread's tasks.
    void run(const T* q, T* out) {
        while (task_.tile != nullptr) {
            const AttentionTask next = tasks_.take();
            gather(q);
            attend_pages(next);
            finish(out);
            task_ = next;
        }
    }

  private:
    int64_t count() const { return task_.tile->num_rows * per_group_; }

    int64_t place_of(int64_t kv_head, int64_t i) const {
        const int64_t row = task_.tile->first_row + i / per_group_, head = (task_.first_kv_head + kv_head) * per_group_ + i % per_group_;
        return (row * num_heads_ + head) * pages_.head_dim;
    }

    Queries<T> queries_of(int64_t kv_head) const {
        const int64_t head_dim = pages_.head_dim;
        return {space_.queries.data() + kv_head * count() * head_dim, count(), per_group_, head_dim, 1.0f / std::sqrt(float(head_dim)), *task_.tile};
    }

    void gather(const T* q) {
        const int64_t head_dim = pages_.head_dim;
        space_.sums.resize(std::max<size_t>(space_.sums.size(), task_.num_kv_heads));
        space_.queries.resize(task_.num_kv_heads * count() * head_dim);
        for (int64_t kv_head = 0; kv_head < task_.num_kv_heads; kv_head++) {
            space_.sums[kv_head].begin(count(), head_dim);
            for (int64_t i = 0; i < count(); i++)
                std::copy_n(q + place_of(kv_head, i), head_dim, space_.queries.data() + (kv_head * count() + i) * head_dim);
        }
    }

    // Before: `chunk_` is the first chunk of the task; after: the first chunk of `next`.
    void attend_pages(const AttentionTask& next) {
        bool is_last = false;
        for (int64_t first = kChunk; !is_last; first += kChunk) {
            next_chunk_->fill(pages_, *task_.tile, task_.first_kv_head, first);
            is_last = next_chunk_->count == 0;
            if (is_last && next.tile != nullptr) next_chunk_->fill(pages_, *next.tile, next.first_kv_head, 0);
            Prefetcher<T> prefetcher(*next_chunk_, task_.num_kv_heads, pages_.head_dim, task_.num_kv_heads * num_prefetches(queries_of(0), *chunk_));
            for (int64_t kv_head = 0; kv_head < task_.num_kv_heads; kv_head++) {
                attend_chunk(queries_of(kv_head), *chunk_, space_.packed, space_.sums[kv_head], prefetcher);
                chunk_->go_to_next_head(pages_.head_dim);
            }
            std::swap(chunk_, next_chunk_);
        }
    }

    void finish(T* out) {
        const int64_t head_dim = pages_.head_dim;
        for (int64_t kv_head = 0; kv_head < task_.num_kv_heads; kv_head++) {
            SoftmaxState& sums = space_.sums[kv_head];
            if (task_.tile->first_row >= tails_.first_row)
                attend_tails(queries_of(kv_head), tails_, task_.first_kv_head + kv_head, pages_.num_kv_heads, sums);
            for (int64_t i = 0; i < count(); i++) {
                const float* sum = sums.out.data() + i * sums.padded;
                T* to = out + place_of(kv_head, i);
                const float inverse = 1.0f / sums.total[i];
                int64_t k = 0;
                for (; k + kWidth <= head_dim; k += kWidth) store(to + k, load(sum + k) * inverse);
                for (; k < head_dim; k++) store_one(to + k, sum[k] * inverse);
            }
        }
    }

    const Pages<T> pages_;
    const TailPlaces<T> tails_;
    TaskQueue tasks_;
    const int64_t num_heads_, per_group_;
    Workspace<T>& space_;
    AttentionTask task_;
    Chunk<T> chunks_[2];
    Chunk<T> *chunk_ = &chunks_[0], *next_chunk_ = &chunks_[1];  // swapped, not copied
};

}  // namespace tailrace
