// Prefetches the next chunk of keys and values into the L2 cache while the current one is multiplied.

#pragma once

#include "paged_context.h"

namespace tailrace {

// Spreads the prefetches over `steps` calls: a burst would exceed the number of outstanding cache misses and stall. Pages are not
// contiguous, so the hardware prefetcher does not find the next one.
template <class T>
class Prefetcher {
  public:
    Prefetcher(const Chunk<T>& chunk, int64_t heads, int64_t head_dim, int64_t steps)
        : chunk_(chunk), heads_(heads), head_dim_(head_dim), per_step_((chunk.count * heads + steps - 1) / steps) {}

    void fetch() { fetch(per_step_); }
    void fetch_all() { fetch(chunk_.count * heads_); }

  private:
    // The next `count` heads of tokens.
    void fetch(int64_t count) {
        for (; count > 0 && token_ < chunk_.count; count--) {
            for (int64_t k = head_ * head_dim_; k < (head_ + 1) * head_dim_; k += 64 / int64_t(sizeof(T))) {
                __builtin_prefetch(chunk_.keys[token_] + k, 0, 2);
                __builtin_prefetch(chunk_.values[token_] + k, 0, 2);
            }
            if (++head_ == heads_) head_ = 0, token_++;
        }
    }

    const Chunk<T>& chunk_;
    const int64_t heads_, head_dim_, per_step_;
    int64_t token_ = 0, head_ = 0;
};

}  // namespace tailrace
