// How a layer's attention is dealt out to threads: whoever is free takes the next task.

#pragma once

#include <atomic>

#include "context.h"

namespace tailrace {

constexpr int64_t kTilesAlone = 4;  // for each thread, from which a tile need not be shared

// One tile and a run of the key/value heads. No tile: nothing is left.
struct Task {
    const Tile* tile;
    int64_t first_group, num_groups;
};

// Where there are tiles enough a task is all heads of one, whose keys lie together in memory; else one head.
class Tasks {
  public:
    Tasks(const Tile* tiles, int64_t num_tiles, int64_t num_groups, int threads, std::atomic<int64_t>& taken)
        : tiles_(tiles), run_(num_tiles >= kTilesAlone * threads ? num_groups : 1), runs_(num_groups / run_), count_(num_tiles * runs_),
          taken_(taken) {}

    Task take() {
        const int64_t index = taken_.fetch_add(1, std::memory_order_relaxed);
        if (index >= count_) return {nullptr, 0, 0};
        return {tiles_ + index / runs_, index % runs_ * run_, run_};
    }

  private:
    const Tile* tiles_;
    int64_t run_, runs_, count_;
    std::atomic<int64_t>& taken_;
};

}  // namespace tailrace
