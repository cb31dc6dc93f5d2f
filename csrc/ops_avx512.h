// Vector operations with AVX-512 F, BW, VL, DQ and VNNI: 16 lanes.
#pragma once

#include "ops_avx2.h"

namespace kt {
namespace {

struct Avx512 {
    static constexpr int W = 16;
    using vf = __m512;
    using vi = __m512i;
    using vs = __m512i;  // 32 int16
    using vmask = __mmask16;

    static vf set1(float x) { return _mm512_set1_ps(x); }
    static vf load(const float* from) { return _mm512_loadu_ps(from); }
    static vf load(const bf16* from) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    static vf load(const fp16* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static void store(float* to, vf x) { _mm512_storeu_ps(to, x); }
    static void store(bf16* to, vf x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded =
            _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i out = _mm512_mask_blend_epi32(nan, rounded, quiet);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(out));
    }
    static void store(fp16* to, vf x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
    static vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
    static vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
    static vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
    static vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
    static vf fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
    static vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
    static vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
    static vf abs(vf a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
    static vmask less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    static vf select(vmask mask, vf a, vf b) { return _mm512_mask_blend_ps(mask, b, a); }
    static vi to_int(vf x) { return _mm512_cvtps_epi32(x); }
    static vf to_float_lanes(vi x) { return _mm512_cvtepi32_ps(x); }
    static vf power_of_two(vi n) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
    }
    static vf bits_to_exponent(vf x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23)); }
    static vf iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    static float first(vf x) { return _mm512_cvtss_f32(x); }
    static float reduce_add(vf x) {
        return Avx2::reduce_add(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
    }
    static float reduce_max(vf x) {
        return Avx2::reduce_max(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
    }

    static vi zero_int() { return _mm512_setzero_si512(); }
    static vs widen(const int8_t* from) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static vs broadcast4(const int16_t* from) {
        int64_t four;
        std::memcpy(&four, from, 8);
        return _mm512_set1_epi64(four);
    }
    static void add_dot(vi& acc, vs a, vs b) { acc = _mm512_dpwssd_epi32(acc, a, b); }
    static vi pair_sum(vi a, vi b) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        return _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b));
    }
    static void store_int16(int16_t* to, vi x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtsepi32_epi16(x));
    }
    static void store_int8(int8_t* to, vi x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(x));
    }
    KT_INLINE static void prefetch(const void* at) { Avx2::prefetch(at); }

    template <class T>
    static void transpose8(const T* const rows[8], int channel, float* to, int stride) {
        Avx2::transpose8(rows, channel, to, stride);
    }
};

}  // namespace
}  // namespace kt
