// The C interface of the library, and its parallel regions.

#include "amx_self_test.h"
#include "forward_pass.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

using namespace tailrace;

namespace {

template <class Work>
void run_parallel(int threads, Work work) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    {
        work(omp_get_thread_num(), omp_get_num_threads());
        release_tiles();
    }
#else
    work(0, 1);
    release_tiles();
#endif
}

template <class T>
void forward(const TailraceModel& model, const TailraceStep& step, int threads) {
    ForwardPass<T> pass(model, step);
    run_parallel(threads, [&](int thread, int threads) { pass.run(thread, threads); });
}

// The matrix without its first rows.
template <class T>
TailraceMatrix rows_from(const TailraceMatrix& matrix, int64_t first, int64_t size) {
    if (!matrix.scales) return {static_cast<const T*>(matrix.weight) + first * size, nullptr, nullptr, nullptr, nullptr, nullptr};
    const int64_t groups = padded(size) / 32, row_bytes = matrix.multipliers ? padded(size) / 2 : padded(size);
    const uint8_t* multipliers = matrix.multipliers ? matrix.multipliers + first * groups : nullptr;
    return {static_cast<const uint8_t*>(matrix.weight) + first * row_bytes, nullptr, nullptr, matrix.scales + first, matrix.sums + first, multipliers};
}

template <class T>
void score(const T* x, const TailraceMatrix& weight, float* out, int64_t rows, int64_t size, int64_t width, int threads) {
    const auto put = [&](int64_t row, int64_t n, float* const* y, int count) { std::copy_n(y[0], count, out + row * width + n); };
    if (!weight.scales) {
        const Product<T, T> product = {x, static_cast<const T*>(weight.weight), rows, size, width, 1};
        return run_parallel(threads, [&](int thread, int threads) { multiply(product, thread, threads, kGemmMinRows, put); });
    }
    std::vector<uint8_t> bytes(rows * padded(size));
    std::vector<float> scales(rows);
    for (int64_t row = 0; row < rows; row++) scales[row] = quantise(x + row * size, size, padded(size), bytes.data() + row * padded(size));
    run_parallel(threads, [&](int thread, int threads) {
        multiply_bytes(weight, bytes.data(), scales.data(), rows, size, width, 1, thread, threads, put);
    });
}

}  // namespace

extern "C" {

// Call once before the other functions. Returns an `Amx` of `library.py`.
int32_t tailrace_start() { return int32_t(enable_amx()); }

// Whether matrices can be packed: with AVX-512.
int32_t tailrace_packs() {
#if defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

// Pack a matrix of `parts` times `width` rows of `words` 32-bit words into strips: `parts` times `width`, rounded up to 16, such rows.
void tailrace_pack(const uint32_t* from, int64_t parts, int64_t width, int64_t words, uint32_t* strips) {
#if defined(__AVX512F__)
    pack_matrix(from, int(parts), width, words, strips);
#endif
}

void tailrace_forward(const TailraceModel* model, const TailraceStep* step, int32_t threads) {
    if (model->is_bf16) forward<Bf16>(*model, *step, threads);
    else forward<float>(*model, *step, threads);
}

// out (rows, width) fp32 = x (rows, size), of the model's dtype, times the rows of a matrix of any kind from `first` on.
void tailrace_score(
    int32_t is_bf16, const void* x, const TailraceMatrix* weight, float* out, int64_t rows, int64_t size, int64_t first, int64_t width,
    int32_t threads
) {
    if (is_bf16) score(static_cast<const Bf16*>(x), rows_from<Bf16>(*weight, first, size), out, rows, size, width, threads);
    else score(static_cast<const float*>(x), rows_from<float>(*weight, first, size), out, rows, size, width, threads);
}
}
