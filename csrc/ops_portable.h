// Vector operations in plain C++ with the vector extension of GCC and Clang: 4 lanes, SSE2 or NEON underneath.
#pragma once

#include <cstring>

#include "halves.h"

namespace kt {
namespace {

struct Portable {
    static constexpr int W = 4;
    using vf = float __attribute__((vector_size(16)));
    using vi = int32_t __attribute__((vector_size(16)));
    using vmask = vi;
    struct vs {
        int16_t lane[8];
    };

    static vf set1(float x) { return vf{x, x, x, x}; }
    static vf load(const float* from) {
        vf x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }
    template <class T>
    static vf load(const T* from) {
        return vf{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
    }
    static void store(float* to, vf x) { std::memcpy(to, &x, sizeof x); }
    template <class T>
    static void store(T* to, vf x) {
        for (int i = 0; i < W; ++i) from_float(x[i], to + i);
    }
    static vf add(vf a, vf b) { return a + b; }
    static vf sub(vf a, vf b) { return a - b; }
    static vf mul(vf a, vf b) { return a * b; }
    static vf div(vf a, vf b) { return a / b; }
    static vf fma(vf a, vf b, vf c) { return a * b + c; }
    static vf fnma(vf a, vf b, vf c) { return c - a * b; }
    static vf max(vf a, vf b) { return select(b < a, a, b); }  // b where either is NaN, as on x86
    static vf min(vf a, vf b) { return select(a < b, a, b); }
    static vf abs(vf a) { return reinterpret_cast<vf>(reinterpret_cast<vi>(a) & 0x7fffffff); }
    static vmask less(vf a, vf b) { return a < b; }
    static vf select(vmask mask, vf a, vf b) {
        return reinterpret_cast<vf>((mask & reinterpret_cast<vi>(a)) | (~mask & reinterpret_cast<vi>(b)));
    }
    // To nearest, ties to even, for |x| < 2^22; larger or NaN gives some integer.
    static vi to_int(vf x) {
        const vf magic = set1(12582912.0f);  // 1.5 * 2^23
        return reinterpret_cast<vi>(x + magic) - reinterpret_cast<vi>(magic);
    }
    static vf to_float_lanes(vi x) {
        return vf{static_cast<float>(x[0]), static_cast<float>(x[1]), static_cast<float>(x[2]),
                  static_cast<float>(x[3])};
    }
    static vf power_of_two(vi n) { return reinterpret_cast<vf>((n + 127) << 23); }
    // The last 9 bits of x, moved up to where a float has its sign and exponent.
    static vf bits_to_exponent(vf x) { return reinterpret_cast<vf>(reinterpret_cast<vi>(x) << 23); }
    static vf iota() { return vf{0, 1, 2, 3}; }
    static float first(vf x) { return x[0]; }
    static float reduce_add(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
    static float reduce_max(vf x) { return larger(larger(x[0], x[2]), larger(x[1], x[3])); }

    static vi zero_int() { return vi{0, 0, 0, 0}; }
    static vs widen(const int8_t* from) {
        vs x;
        for (int i = 0; i < 8; ++i) x.lane[i] = from[i];
        return x;
    }
    static vs broadcast4(const int16_t* from) {
        vs x;
        std::memcpy(x.lane, from, 8);
        std::memcpy(x.lane + 4, from, 8);
        return x;
    }
    static void add_dot(vi& acc, const vs& a, const vs& b) {
        vi sum;
        for (int i = 0; i < 4; ++i) sum[i] = a.lane[2 * i] * b.lane[2 * i] + a.lane[2 * i + 1] * b.lane[2 * i + 1];
        acc += sum;
    }
    static vi pair_sum(vi a, vi b) { return vi{a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]}; }
    static void store_int16(int16_t* to, vi x) {
        for (int i = 0; i < W; ++i) to[i] = static_cast<int16_t>(smaller(larger(x[i], -32768), 32767));
    }
    static void store_int8(int8_t* to, vi x) {
        for (int i = 0; i < W; ++i) to[i] = static_cast<int8_t>(smaller(larger(x[i], -128), 127));
    }
    KT_INLINE static void prefetch(const void* at) { __builtin_prefetch(at); }

    // to[c * stride + t] = rows[t][c] for 8 rows and 8 channels.
    template <class T>
    static void transpose8(const T* const rows[8], int channel, float* to, int stride) {
        for (int t = 0; t < 8; ++t) {
            for (int c = 0; c < 8; ++c) to[c * stride + t] = to_float(rows[t][channel + c]);
        }
    }
};

}  // namespace
}  // namespace kt
