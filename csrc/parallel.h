// Threads by OpenMP, in the runtime and pool that torch uses; serial where the compiler has none. Sets no variable.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kt {

constexpr int64_t kSerialNanoseconds = 20000;  // waking the pool costs 6-8 us

inline int thread_count(int allowed, int64_t nanoseconds) {
    return nanoseconds < kSerialNanoseconds || allowed < 1 ? 1 : allowed;
}

// body(index, thread) for 0 <= index < count, in pieces of `grain` handed to whoever is free. `body` must not throw.
template <class Body>
void for_each(int64_t count, int num_threads, int64_t grain, Body body) {
#ifdef _OPENMP
    if (num_threads > 1 && count > grain) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, grain)
        for (int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
        return;
    }
#endif
    (void)num_threads;
    (void)grain;
    for (int64_t i = 0; i < count; ++i) body(i, 0);
}

}  // namespace kt
