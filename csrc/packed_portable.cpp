// Products with packed weights in plain C++: what every machine can run.
#include "ops_portable.h"
#include "packed_dense.h"
#include "packed_product.h"

namespace kt {
namespace {

struct PortablePacked : Portable {
    template <int R>
    static void dots8(const uint8_t* codes, const int8_t* const (&x)[R], const int32_t (&)[R], vi (&dots)[R]) {
        for (int r = 0; r < R; ++r) dots[r] = zero_int();
        for (int chunk = 0; chunk < kGroupInputs / kChunkInputs; ++chunk, codes += kChunkBytes) {
            for (int r = 0; r < R; ++r) {
                for (int i = 0; i < W * kChunkInputs; ++i) {
                    const int weight = static_cast<int8_t>(codes[i]);
                    dots[r][i / kChunkInputs] += weight * x[r][chunk * kChunkInputs + i % kChunkInputs];
                }
            }
        }
    }

    template <int R>
    static void dots4(const uint8_t* codes, const int8_t* const (&x)[R], vi (&dots)[R]) {
        constexpr int kHalf = kGroupInputs / 2;
        for (int r = 0; r < R; ++r) dots[r] = zero_int();
        for (int chunk = 0; chunk < kHalf / kChunkInputs; ++chunk, codes += kChunkBytes) {
            for (int r = 0; r < R; ++r) {
                const int8_t* at = x[r] + chunk * kChunkInputs;
                for (int i = 0; i < W * kChunkInputs; ++i) {
                    const int k = i % kChunkInputs;
                    dots[r][i / kChunkInputs] += (codes[i] & 15) * at[k] + (codes[i] >> 4) * at[kHalf + k];
                }
            }
        }
    }
};

}  // namespace

const PackedKernels kPackedPortable = {"portable", code_row<PortablePacked>, multiply<PortablePacked>,
                                       multiply_dense<PortablePacked>};

}  // namespace kt
