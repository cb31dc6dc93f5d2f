#pragma once

#include <cstdint>

namespace kt {

// Bytes per second of pure reading: the median of `rounds` passes over `bytes` of memory.
double read_bandwidth(int64_t bytes, int num_threads, int rounds);

}  // namespace kt
