// Products with packed weights with AVX2. Compiled with those flags; run only where the processor has them.
#include "ops_avx2.h"
#include "packed_dense.h"
#include "packed_product.h"

namespace kt {
namespace {

struct Avx2Packed : Avx2 {
    KT_INLINE static vi load_codes(const uint8_t* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }
    KT_INLINE static vi four(const int8_t* from) {  // four inputs, the same for every output
        int32_t bytes;
        std::memcpy(&bytes, from, 4);
        return _mm256_set1_epi32(bytes);
    }

    // In assembly, because GCC reorders the sums of an unrolled group and spills the products meanwhile.
    KT_INLINE static void add_words(vi& sum, vi x) { __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x)); }
    KT_INLINE static void add_ints(vi& sum, vi x) { __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x)); }

    // Bytes are multiplied as unsigned by signed, so the weight's sign moves to the input: 2 * 128 * 127 fits int16.
    template <int R>
    KT_INLINE static void dots8(const uint8_t* codes, const int8_t* const (&x)[R], const int32_t (&)[R],
                                vi (&dots)[R]) {
        const vi ones = _mm256_set1_epi16(1);
        for (int r = 0; r < R; ++r) dots[r] = zero_int();
#pragma GCC unroll 8
        for (int chunk = 0; chunk < kGroupInputs / kChunkInputs; ++chunk) {
            const vi weights = load_codes(codes + chunk * kChunkBytes);
            const vi sizes = _mm256_abs_epi8(weights);
            for (int r = 0; r < R; ++r) {
                const vi inputs = _mm256_sign_epi8(four(x[r] + chunk * kChunkInputs), weights);
                const vi pairs = _mm256_maddubs_epi16(sizes, inputs);
                add_ints(dots[r], _mm256_madd_epi16(pairs, ones));
            }
        }
    }

    // A lane of int16 takes all 16 products of its pair of inputs: 16 * 15 * 127 fits.
    template <int R>
    KT_INLINE static void dots4(const uint8_t* codes, const int8_t* const (&x)[R], vi (&dots)[R]) {
        constexpr int kHalf = kGroupInputs / 2;
        const vi nibble = _mm256_set1_epi8(15);
        for (int r = 0; r < R; ++r) dots[r] = zero_int();
#pragma GCC unroll 4
        for (int chunk = 0; chunk < kHalf / kChunkInputs; ++chunk) {
            const vi both = load_codes(codes + chunk * kChunkBytes);
            const vi low = _mm256_and_si256(both, nibble);
            const vi high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
            for (int r = 0; r < R; ++r) {
                const int8_t* at = x[r] + chunk * kChunkInputs;
                add_words(dots[r], _mm256_maddubs_epi16(low, four(at)));
                add_words(dots[r], _mm256_maddubs_epi16(high, four(at + kHalf)));
            }
        }
        for (int r = 0; r < R; ++r) dots[r] = _mm256_madd_epi16(dots[r], _mm256_set1_epi16(1));
    }
};

}  // namespace

const PackedKernels kPackedAvx2 = {"avx2", code_row<Avx2Packed>, multiply<Avx2Packed>,
                                   multiply_dense<Avx2Packed>};

}  // namespace kt
