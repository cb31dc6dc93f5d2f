// Vector operations with AVX2, FMA and F16C: 8 lanes.
#pragma once

#include <immintrin.h>

#include "ops_portable.h"

namespace kt {
namespace {

struct Avx2 {
    static constexpr int W = 8;
    using vf = __m256;
    using vi = __m256i;
    using vs = __m256i;  // 16 int16
    using vmask = __m256;

    static vf set1(float x) { return _mm256_set1_ps(x); }
    static vf load(const float* from) { return _mm256_loadu_ps(from); }
    static vf load(const bf16* from) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    static vf load(const fp16* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static void store(float* to, vf x) { _mm256_storeu_ps(to, x); }
    static void store(bf16* to, vf x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded =
            _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m256i out = _mm256_blendv_epi8(rounded, quiet, nan);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(out, out), 0xD8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
    }
    static void store(fp16* to, vf x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
    static vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
    static vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
    static vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
    static vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
    static vf fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
    static vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
    static vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
    static vf abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static vmask less(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
    static vf select(vmask mask, vf a, vf b) { return _mm256_blendv_ps(b, a, mask); }
    static vi to_int(vf x) { return _mm256_cvtps_epi32(x); }
    static vf to_float_lanes(vi x) { return _mm256_cvtepi32_ps(x); }
    static vf power_of_two(vi n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    static vf bits_to_exponent(vf x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23)); }
    static vf iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
    static float first(vf x) { return _mm256_cvtss_f32(x); }
    static float reduce_add(vf x) {
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }
    static float reduce_max(vf x) {
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
    }

    static vi zero_int() { return _mm256_setzero_si256(); }
    static vs widen(const int8_t* from) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static vs broadcast4(const int16_t* from) {
        int64_t four;
        std::memcpy(&four, from, 8);
        return _mm256_set1_epi64x(four);
    }
    static void add_dot(vi& acc, vs a, vs b) {
        // In assembly, because GCC copies and spills the accumulators of an unrolled tile when it may choose.
        __asm__("vpaddd %1, %0, %0" : "+x"(acc) : "x"(_mm256_madd_epi16(a, b)));
    }
    static vi pair_sum(vi a, vi b) { return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xD8); }
    static void store_int16(int16_t* to, vi x) {
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(x, x), 0xD8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
    }
    static void store_int8(int8_t* to, vi x) {
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x, x), 0xD8);
        const __m128i low = _mm256_castsi256_si128(words);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(low, low));
    }
    KT_INLINE static void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

    template <class T>
    static void transpose8(const T* const rows[8], int channel, float* to, int stride) {
        __m256 a[8], b[8];
        for (int t = 0; t < 8; ++t) a[t] = load(rows[t] + channel);
        for (int t = 0; t < 8; t += 2) {
            b[t] = _mm256_unpacklo_ps(a[t], a[t + 1]);
            b[t + 1] = _mm256_unpackhi_ps(a[t], a[t + 1]);
        }
        for (int t = 0; t < 8; t += 4) {
            a[t] = _mm256_shuffle_ps(b[t], b[t + 2], 0x44);
            a[t + 1] = _mm256_shuffle_ps(b[t], b[t + 2], 0xEE);
            a[t + 2] = _mm256_shuffle_ps(b[t + 1], b[t + 3], 0x44);
            a[t + 3] = _mm256_shuffle_ps(b[t + 1], b[t + 3], 0xEE);
        }
        for (int c = 0; c < 4; ++c) {
            store(to + c * stride, _mm256_permute2f128_ps(a[c], a[c + 4], 0x20));
            store(to + (c + 4) * stride, _mm256_permute2f128_ps(a[c], a[c + 4], 0x31));
        }
    }
};

}  // namespace
}  // namespace kt
