// The forward pass of one step: the computation of `LayerLoop` over `TorchOps`, fused, by threads with a barrier between phases. The residual
// is kept in fp32, rows between matrices in the model's dtype.

#pragma once

#include <initializer_list>
#include <memory>

#include "attention.h"
#include "model.h"
#include "gemm.h"
#include "row_ops.h"

namespace tailrace {

// From this many rows packing W pays off; int8 has half as much to pack.
constexpr int64_t kGemmMinRows = 40, kInt8GemmMinRows = 12;
#if defined(__AVX512F__)
constexpr bool kHasGemm = true;
#else
constexpr bool kHasGemm = false;
#endif
constexpr int64_t kMaxParts = 3;  // projections of a joined matrix

int64_t padded(int64_t size) { return (size + 63) / 64 * 64; }

// Quantised rows of x times a matrix of int8 or of 4 bits. `put` as in `multiply`.
template <class Put>
inline void multiply_bytes(
    const TailraceMatrix& matrix, const uint8_t* x, const float* x_scales, int64_t rows, int64_t size, int64_t width, int parts, int thread,
    int threads, Put put
) {
    const auto put_real = [&](int64_t row, int64_t n, float* const* y, int count) {
        for (int part = 0; part < parts; part++) {
            const int64_t at = part * width + n;
            dequantise(y[part], matrix.sums + at, matrix.scales + at, x_scales[row], count);
        }
        put(row, n, y, count);
    };
    if (matrix.multipliers) {
        const Product<uint8_t, Int4> product = {x, static_cast<const Int4*>(matrix.weight), rows, padded(size), width, parts, matrix.multipliers};
        return multiply(product, thread, threads, kInt8GemmMinRows, put_real);
    }
    const Product<uint8_t, int8_t> product = {x, static_cast<const int8_t*>(matrix.weight), rows, padded(size), width, parts, nullptr, matrix.strips};
    multiply(product, thread, threads, kInt8GemmMinRows, put_real);
}

// The low-rank change of a joined matrix, whose projection p has the columns ends[p - 1] to ends[p] - 1.
struct LowRank {
    TailraceAdapterRows rows;
    TailraceSlots slots;
    bool is_late;  // added after the product, row by row: of rows without gemm, whose columns come in pieces
    int parts;
    int64_t ends[kMaxParts];

    int64_t width() const { return ends[parts - 1]; }
};

// y += low (ROWS,) times up (ROWS, width), `count` columns of it.
template <int ROWS, class T>
inline void add_rows(const float* low, const T* up, int64_t width, int64_t count, float* y) {
    int64_t n = 0;
    for (; n + kWidth <= count; n += kWidth) {
        Floats sum = load(y + n);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sum += low[r] * load(up + r * width + n);
        store(y + n, sum);
    }
    for (; n < count; n++)
        for (int r = 0; r < ROWS; r++) y[n] += low[r] * to_float(up[r * width + n]);
}

// y += low (rank,) times up (rank, width), `count` columns of it: four vectors in registers for a panel's columns, otherwise few rows at a time,
// which the hardware prefetcher follows.
template <class T>
inline void add_low_rank(const float* low, const T* up, int64_t rank, int64_t width, int64_t count, float* y) {
    int64_t r = 0;
    if (count == 4 * kWidth) {
        Floats sum[4] = {};
        for (; r < rank; r++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) sum[v] += low[r] * load(up + r * width + v * kWidth);
        for (int v = 0; v < 4; v++) store(y + v * kWidth, load(y + v * kWidth) + sum[v]);
    }
    for (; r + 4 <= rank; r += 4) add_rows<4>(low + r, up + r * width, width, count, y);
    for (; r < rank; r++) add_rows<1>(low + r, up + r * width, width, count, y);
}

// Reads rows ahead into the L2 cache: short streams, which the hardware prefetcher does not follow.
template <class T>
inline void prefetch_rows(const T* from, int64_t count) {
    for (int64_t k = 0; k < count; k += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + k, 0, 2);
}

// The phases of one step. In each phase a thread handles its share of the rows, of a matrix's columns or of the tiles.
template <class T>
class ForwardPass {
  public:
    ForwardPass(const TailraceModel& model, const TailraceStep& step)
        : model_(model), step_(step), query_width_(model.num_heads * model.head_dim),
          qkv_width_((model.num_heads + 2 * model.num_kv_heads) * model.head_dim), residual_(new float[step.rows * model.hidden]),
          qkv_(new float[step.rows * qkv_width_]), x_(new T[step.rows * std::max(model.hidden, query_width_)]),
          heads_or_ffn_(new T[step.rows * std::max(query_width_, model.ffn)]), cos_sin_(new float[step.rows * model.head_dim]),
          gates_(new float[num_kept(step) * 2 * model.ffn]), scales_(new float[step.rows]),
          bytes_(new uint8_t[model.is_quantised ? step.rows * padded(std::max({model.hidden, query_width_, model.ffn})) : 0]),
          low_(new float[step.adapter_rows.num_segments ? step.rows * kMaxParts * step.slot_rank : 0]),
          next_task_(new std::atomic<int64_t>[model.num_layers]()) {}

    void run(int thread, int threads) {
        int64_t count = step_.rows;
        Range rows(count, 1, thread, threads);
        TailraceAdapterRows adapters = step_.adapter_rows;
        const auto change_of = [&](int64_t index, auto slots, std::initializer_list<int64_t> ends, const T* x, int64_t size) {
            LowRank change = {adapters, {nullptr, nullptr}, !kHasGemm || count < kGemmMinRows, int(ends.size()), {}};
            std::copy(ends.begin(), ends.end(), change.ends);
            if (!adapters.num_segments) return change;
            change.slots = step_.adapters[index].*slots;
            project_down(change, x, size, thread, threads);
            return change;
        };
        const auto add_to_residual = [this](int64_t row, int64_t n, const float* y, int count) {
            for (int i = 0; i < count; i++) residual_[row * model_.hidden + n + i] += y[i];
        };
        Workspace<T> space;
        embed(rows);
        for (int64_t index = 0; index < model_.num_layers; index++) {
            const TailraceLayer& layer = model_.layers[index];
            norm(rows, layer.attention_norm, x_.get());
            quantise_rows(rows, x_.get(), model_.hidden);
            const int64_t query = query_width_, key = query + (qkv_width_ - query_width_) / 2, ffn = model_.ffn, hidden = model_.hidden;
            const LowRank qkv = change_of(index, &TailraceLayerSlots::qkv, {query, key, qkv_width_}, x_.get(), hidden);
            linear(layer.qkv, qkv, x_.get(), count, model_.hidden, qkv_width_, thread, threads, [this](int64_t row, int64_t n, const float* y, int count) {
                std::copy_n(y, count, qkv_.get() + row * qkv_width_ + n);
            });
            Attention<T> attention = attention_of(index, threads, space);
            barrier();
            add_changes(qkv, rows, qkv_.get());
            rope_and_store(rows, layer, index);
            barrier();
            attention.run(heads_or_ffn_.get(), x_.get());
            barrier();
            if (index == model_.num_layers - 1 && step_.num_outputs < step_.rows) {
                if (thread == 0) keep_output_rows();
                barrier();
                count = step_.num_outputs;
                adapters = step_.output_adapter_rows;
                rows = Range(count, 1, thread, threads);
            }
            if (model_.is_quantised) quantise_rows(rows, x_.get(), query_width_);
            const LowRank output = change_of(index, &TailraceLayerSlots::output, {hidden}, x_.get(), query);
            linear(layer.output, output, x_.get(), count, query, hidden, thread, threads, add_to_residual);
            barrier();
            add_changes(output, rows, residual_.get());
            norm(rows, layer.ffn_norm, x_.get());
            quantise_rows(rows, x_.get(), model_.hidden);
            const LowRank both = change_of(index, &TailraceLayerSlots::gate_up, {ffn, 2 * ffn}, x_.get(), hidden);
            gate_up(layer.gate_up, both, count, rows, thread, threads);
            barrier();
            if (model_.is_quantised) quantise_rows(rows, heads_or_ffn_.get(), model_.ffn);
            const LowRank down = change_of(index, &TailraceLayerSlots::down, {hidden}, heads_or_ffn_.get(), ffn);
            linear(layer.down, down, heads_or_ffn_.get(), count, ffn, hidden, thread, threads, add_to_residual);
            barrier();
            add_changes(down, rows, residual_.get());
        }
        norm(rows, model_.norm, static_cast<T*>(step_.hidden));
    }

  private:
    // The rows whose gate and up are collected: few, or all that may have a late change.
    static int64_t num_kept(const TailraceStep& step) {
        return !kHasGemm && step.adapter_rows.num_segments ? step.rows : std::min(step.rows, kGemmMinRows);
    }

    static void barrier() {
#if defined(_OPENMP)
#pragma omp barrier
#endif
    }

    void embed(const Range& rows) {
        const int64_t half = model_.head_dim / 2;
        for (int64_t row = rows.first; row < rows.last; row++) {
            look_up(step_.tokens[row], residual_.get() + row * model_.hidden);
            for (int64_t pair = 0; pair < half; pair++) {
                const float angle = float(step_.positions[row]) / model_.periods[pair];
                cos_sin_[row * 2 * half + pair] = std::cos(angle) * model_.rope_scale;
                cos_sin_[row * 2 * half + half + pair] = std::sin(angle) * model_.rope_scale;
            }
        }
    }

    // The embedding of a token.
    void look_up(int64_t token, float* out) const {
        const int64_t size = model_.hidden;
        if (const float* scales = model_.embedding.scales) {
            const int8_t* codes = static_cast<const int8_t*>(model_.embedding.weight) + token * padded(size);
            for (int64_t k = 0; k < size; k++) out[k] = float(codes[k]) * scales[token];
        } else {
            const T* embedded = static_cast<const T*>(model_.embedding.weight) + token * size;
            for (int64_t k = 0; k < size; k++) out[k] = to_float(embedded[k]);
        }
    }

    void norm(const Range& rows, const void* weight, T* out) {
        const int64_t size = model_.hidden;
        for (int64_t row = rows.first; row < rows.last; row++)
            rms_norm(residual_.get() + row * size, static_cast<const T*>(weight), size, model_.eps, out + row * size);
    }

    // Quantise these rows if the matrices are quantised, then make all rows visible to the other threads.
    void quantise_rows(const Range& rows, const T* x, int64_t size) {
        if (model_.is_quantised)
            for (int64_t row = rows.first; row < rows.last; row++)
                scales_[row] = quantise(x + row * size, size, padded(size), bytes_.get() + row * padded(size));
        barrier();
    }

    // Move what the last layer continues with, residual and attention's output, to the first rows.
    void keep_output_rows() {
        for (int64_t row = 0; row < step_.num_outputs; row++) {
            const int64_t from = step_.output_rows[row];
            std::copy_n(residual_.get() + from * model_.hidden, model_.hidden, residual_.get() + row * model_.hidden);
            std::copy_n(x_.get() + from * query_width_, query_width_, x_.get() + row * query_width_);
        }
    }

    // Multiply the rows that have an adapter by its matrices `down`, and make the products visible to the other threads.
    void project_down(const LowRank& change, const T* x, int64_t size, int thread, int threads) {
        for (int64_t number = 0; number < change.rows.num_segments * change.parts; number++) {
            const TailraceSegment& segment = change.rows.segments[number / change.parts];
            const int64_t part = number % change.parts;
            const T* down = down_of(change, number, size);
            if (const int64_t next = number + 1; next < change.rows.num_segments * change.parts) {
                const int64_t rank = step_.slot_ranks[change.rows.segments[next / change.parts].slot];
                const Range share(rank, kCols, int((thread + next) % threads), threads);
                prefetch_rows(down_of(change, next, size) + share.first * size, (share.last - share.first) * size);
            }
            const Product<T, T> product = {x + segment.first * size, down, segment.end - segment.first, size, step_.slot_ranks[segment.slot], 1};
            multiply(product, int((thread + number) % threads), threads, kGemmMinRows, [&](int64_t row, int64_t r, float* const* y, int count) {
                std::copy_n(y[0], count, low_of(segment.first + row, part) + r);
            });
        }
        barrier();
    }

    // The matrix `down` of one projection of a segment's adapter, numbered together.
    const T* down_of(const LowRank& change, int64_t number, int64_t size) const {
        const int64_t slot = change.rows.segments[number / change.parts].slot;
        return static_cast<const T*>(change.slots.down) + (slot * change.parts + number % change.parts) * step_.slot_rank * size;
    }

    // The matrix `up` of a row's adapter.
    const T* up_of(const LowRank& change, int64_t row) const {
        return static_cast<const T*>(change.slots.up) + change.rows.slots[row] * step_.slot_rank * change.width();
    }

    float* low_of(int64_t row, int64_t part) { return low_.get() + (row * kMaxParts + part) * step_.slot_rank; }

    // y += the change of `count` columns from n on, which may belong to several projections.
    void add_change(const LowRank& change, int64_t row, int64_t n, int64_t count, float* y) {
        const int64_t slot = change.rows.slots[row];
        if (slot < 0) return;
        const T* up = up_of(change, row);
        for (int64_t part = 0, first = n; part < change.parts && first < n + count; part++) {
            const int64_t end = std::min(change.ends[part], n + count);
            if (end <= first) continue;
            add_low_rank(low_of(row, part), up + first, step_.slot_ranks[slot], change.width(), end - first, y + (first - n));
            first = end;
        }
    }

    // Add a late change to these rows of a joined matrix's output, after a barrier.
    void add_changes(const LowRank& change, const Range& rows, float* out) {
        if (!change.rows.num_segments || !change.is_late) return;
        for (int64_t row = rows.first; row < rows.last; row++) {
            if (const int64_t next = row + 1; next < rows.last && change.rows.slots[next] >= 0 && change.rows.slots[next] != change.rows.slots[row])
                prefetch_rows(up_of(change, next), step_.slot_ranks[change.rows.slots[next]] * change.width());
            add_change(change, row, 0, change.width(), out + row * change.width());
        }
    }

    // out = x W^T + bias + the adapters' change: `put(row, n, y, count)` receives numbers n to n + count - 1 of the row.
    template <class Put>
    void linear(
        const TailraceMatrix& matrix, const LowRank& change, const T* x, int64_t count, int64_t size, int64_t width, int thread, int threads, Put put
    ) {
        multiply_by(matrix, change, x, count, size, width, 1, thread, threads, [&](int64_t row, int64_t n, float* const* y, int count) {
            put(row, n, y[0], count);
        });
    }

    // silu(gate) * up. gemv yields pieces shorter than a vector, so with few rows of a matrix that is not packed gate and up are collected first;
    // so they are with few rows and adapters.
    void gate_up(const TailraceMatrix& matrix, const LowRank& change, int64_t count, const Range& rows, int thread, int threads) {
        const int64_t ffn = model_.ffn;
        const bool has_late = change.rows.num_segments && change.is_late;
        if (!has_late && (count >= kGemmMinRows || matrix.strips))
            return multiply_by(matrix, change, x_.get(), count, model_.hidden, ffn, 2, thread, threads, [&](int64_t row, int64_t n, float* const* y, int count) {
                silu_mul(y[0], y[1], count, heads_or_ffn_.get() + row * ffn + n);
            });
        const int parts = matrix.strips ? 2 : 1;
        const auto keep = [&](int64_t row, int64_t n, float* const* y, int count) {
            for (int part = 0; part < parts; part++) std::copy_n(y[part], count, gates_.get() + (row * 2 + part) * ffn + n);
        };
        multiply_by(matrix, change, x_.get(), count, model_.hidden, 2 * ffn / parts, parts, thread, threads, keep);
        barrier();
        add_changes(change, rows, gates_.get());
        for (int64_t row = rows.first; row < rows.last; row++)
            silu_mul(gates_.get() + row * 2 * ffn, gates_.get() + (row * 2 + 1) * ffn, ffn, heads_or_ffn_.get() + row * ffn);
    }

    template <class Put>
    void multiply_by(
        const TailraceMatrix& matrix, const LowRank& change, const T* x, int64_t count, int64_t size, int64_t width, int parts, int thread, int threads,
        Put put
    ) {
        const auto put_biased = [&](int64_t row, int64_t n, float* const* y, int count) {
            if (const T* bias = static_cast<const T*>(matrix.bias))
                for (int part = 0; part < parts; part++)
                    for (int i = 0; i < count; i++) y[part][i] += to_float(bias[part * width + n + i]);
            if (change.rows.num_segments && !change.is_late)
                for (int part = 0; part < parts; part++) add_change(change, row, part * width + n, count, y[part]);
            put(row, n, y, count);
        };
        if (!model_.is_quantised) {
            const Product<T, T> product = {x, static_cast<const T*>(matrix.weight), count, size, width, parts, nullptr, matrix.strips};
            return multiply(product, thread, threads, kGemmMinRows, put_biased);
        }
        multiply_bytes(matrix, bytes_.get(), scales_.get(), count, size, width, parts, thread, threads, put_biased);
    }

    // Head norms and rope; keys and values go to the paged cache or to the beams' tails.
    void rope_and_store(const Range& rows, const TailraceLayer& layer, int64_t index) {
        const int64_t size = model_.head_dim, width = model_.num_kv_heads * size;
        std::vector<float> normed(size);
        for (int64_t row = rows.first; row < rows.last; row++) {
            const float* heads = qkv_.get() + row * qkv_width_;
            const int64_t slot = slot_of(row, index);
            const bool is_paged = row < step_.paged_rows;
            T* key = static_cast<T*>(is_paged ? step_.keys : step_.tail_keys) + slot * width;
            T* value = static_cast<T*>(is_paged ? step_.values : step_.tail_values) + slot * width;
            for (int64_t head = 0; head < model_.num_heads + model_.num_kv_heads; head++) {
                const bool is_query = head < model_.num_heads;
                const float* x = heads + head * size;
                if (const void* weight = is_query ? layer.query_norm : layer.key_norm) {
                    rms_norm(x, static_cast<const T*>(weight), size, model_.eps, normed.data());
                    x = normed.data();
                }
                T* out = is_query ? heads_or_ffn_.get() + row * query_width_ + head * size : key + (head - model_.num_heads) * size;
                rope(x, cos_sin_.get() + row * size, cos_sin_.get() + row * size + size / 2, size, out);
            }
            copy_row(heads + query_width_ + width, width, value);
        }
    }

    // The slot of a row's keys and values, in tokens from the start of the cache or of the tails.
    int64_t slot_of(int64_t row, int64_t layer) const {
        if (row < step_.paged_rows) return layer * step_.layer_slots + step_.slot_mapping[row];
        const int64_t beam = row - step_.paged_rows, beams = step_.rows - step_.paged_rows;
        return (layer * beams + beam) * step_.num_tail_places + step_.tail_places[beam];
    }

    Attention<T> attention_of(int64_t layer, int threads, Workspace<T>& space) {
        const int64_t token = model_.num_kv_heads * model_.head_dim, at = layer * step_.layer_slots * token;
        const int64_t beams = step_.rows - step_.paged_rows, tail_at = layer * beams * step_.num_tail_places * token;
        const Pages<T> pages = {static_cast<const T*>(step_.keys) + at, static_cast<const T*>(step_.values) + at, step_.block_table,
                                step_.block_tokens, model_.num_kv_heads, model_.head_dim};
        const TailPlaces<T> tails = {static_cast<const T*>(step_.tail_keys) + tail_at,
                                     static_cast<const T*>(step_.tail_values) + tail_at, step_.tail_seen, step_.paged_rows,
                                     step_.num_tail_places};
        const Tile* tiles = step_.is_windowed[layer] ? step_.windowed_tiles : step_.tiles;
        return {pages, tails, TaskQueue(tiles, step_.num_tiles, model_.num_kv_heads, threads, next_task_[layer]), model_.num_heads, space};
    }

    const TailraceModel& model_;
    const TailraceStep& step_;
    const int64_t query_width_, qkv_width_;
    std::unique_ptr<float[]> residual_, qkv_;
    std::unique_ptr<T[]> x_, heads_or_ffn_;
    std::unique_ptr<float[]> cos_sin_, gates_, scales_;
    std::unique_ptr<uint8_t[]> bytes_;
    std::unique_ptr<float[]> low_;  // rows times `down`, by projection
    std::unique_ptr<std::atomic<int64_t>[]> next_task_;  // by layer
};

}  // namespace tailrace
