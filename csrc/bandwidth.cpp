// Measures how fast memory can be read by the threads the kernels run on.
#include "bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "parallel.h"

namespace kt {
namespace {

constexpr int64_t kPieceBytes = 1 << 18;

uint64_t sum_piece(const uint64_t* words) {
    uint64_t sums[16] = {};
    for (int64_t i = 0; i < kPieceBytes / 8; i += 16) {
        for (int lane = 0; lane < 16; ++lane) sums[lane] += words[i + lane];
    }
    uint64_t sum = 0;
    for (const uint64_t lane : sums) sum += lane;
    return sum;
}

}  // namespace

double read_bandwidth(int64_t bytes, int num_threads, int rounds) {
    const int64_t pieces = std::max<int64_t>(bytes / kPieceBytes, 1);
    const std::unique_ptr<uint64_t[]> words(new uint64_t[static_cast<size_t>(pieces * kPieceBytes / 8)]);
    std::vector<uint64_t> sums(static_cast<size_t>(pieces));
    for_each(pieces, num_threads, 1,
             [&](int64_t i, int) { std::memset(words.get() + i * (kPieceBytes / 8), static_cast<int>(i), kPieceBytes); });
    std::vector<double> speeds;
    for (int round = 0; round < std::max(rounds, 1); ++round) {
        const auto start = std::chrono::steady_clock::now();
        for_each(pieces, num_threads, 1, [&](int64_t i, int) {
            sums[static_cast<size_t>(i)] = sum_piece(words.get() + i * (kPieceBytes / 8));
        });
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        speeds.push_back(static_cast<double>(pieces * kPieceBytes) / taken.count());
    }
    volatile uint64_t kept = sums[0];
    (void)kept;
    std::nth_element(speeds.begin(), speeds.begin() + static_cast<int64_t>(speeds.size() / 2), speeds.end());
    return speeds[speeds.size() / 2];
}

}  // namespace kt
