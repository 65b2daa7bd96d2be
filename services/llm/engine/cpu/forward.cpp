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

template <class T>
void score(const T* x, const T* weight, float* out, int64_t rows, int64_t size, int64_t width, int threads) {
    const Product<T, T> product = {x, weight, rows, size, width, 1};
    run_parallel(threads, [&](int thread, int threads) {
        multiply(product, thread, threads, kGemmMinRows, [&](int64_t row, int64_t n, float* const* y, int count) {
            std::copy_n(y[0], count, out + row * width + n);
        });
    });
}

}  // namespace

extern "C" {

// Call once before the other functions. Returns an `Amx` of `library.py`.
int32_t tailrace_start() { return int32_t(enable_amx()); }

void tailrace_forward(const TailraceModel* model, const TailraceStep* step, int32_t threads) {
    if (model->is_bf16) forward<Bf16>(*model, *step, threads);
    else forward<float>(*model, *step, threads);
}

// out (rows, width) fp32 = x (rows, size) times weight (width, size), both of the model's dtype.
void tailrace_score(
    int32_t is_bf16, const void* x, const void* weight, float* out, int64_t rows, int64_t size, int64_t width, int32_t threads
) {
    if (is_bf16) score(static_cast<const Bf16*>(x), static_cast<const Bf16*>(weight), out, rows, size, width, threads);
    else score(static_cast<const float*>(x), static_cast<const float*>(weight), out, rows, size, width, threads);
}
}
