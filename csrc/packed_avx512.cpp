// Products with packed weights with AVX-512 VNNI. Compiled with those flags; run only where the processor has them.
#include "ops_avx512.h"
#include "packed_dense.h"
#include "packed_product.h"

namespace kt {
namespace {

struct Avx512Packed : Avx512 {
    KT_INLINE static vi load_codes(const uint8_t* from) { return _mm512_loadu_si512(from); }
    KT_INLINE static vi four(const int8_t* from) {  // four inputs, the same for every output
        int32_t bytes;
        std::memcpy(&bytes, from, 4);
        return _mm512_set1_epi32(bytes);
    }

    // Bytes are multiplied as unsigned by signed: 128 is added to the weights, and its share taken off beforehand.
    template <int R>
    KT_INLINE static void dots8(const uint8_t* codes, const int8_t* const (&x)[R], const int32_t (&sums)[R],
                                vi (&dots)[R]) {
        for (int r = 0; r < R; ++r) dots[r] = _mm512_set1_epi32(-128 * sums[r]);
#pragma GCC unroll 8
        for (int chunk = 0; chunk < kGroupInputs / kChunkInputs; ++chunk) {
            const vi weights = _mm512_xor_si512(load_codes(codes + chunk * kChunkBytes), _mm512_set1_epi8(-128));
            for (int r = 0; r < R; ++r) {
                dots[r] = _mm512_dpbusd_epi32(dots[r], weights, four(x[r] + chunk * kChunkInputs));
            }
        }
    }

    template <int R>
    KT_INLINE static void dots4(const uint8_t* codes, const int8_t* const (&x)[R], vi (&dots)[R]) {
        constexpr int kHalf = kGroupInputs / 2;
        const vi nibble = _mm512_set1_epi8(15);
        for (int r = 0; r < R; ++r) dots[r] = zero_int();
#pragma GCC unroll 4
        for (int chunk = 0; chunk < kHalf / kChunkInputs; ++chunk) {
            const vi both = load_codes(codes + chunk * kChunkBytes);
            const vi low = _mm512_and_si512(both, nibble);
            const vi high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            for (int r = 0; r < R; ++r) {
                const int8_t* at = x[r] + chunk * kChunkInputs;
                dots[r] = _mm512_dpbusd_epi32(dots[r], low, four(at));
                dots[r] = _mm512_dpbusd_epi32(dots[r], high, four(at + kHalf));
            }
        }
    }
};

}  // namespace

const PackedKernels kPackedAvx512 = {"avx512", code_row<Avx512Packed>, multiply<Avx512Packed>,
                                     multiply_dense<Avx512Packed>};

}  // namespace kt
