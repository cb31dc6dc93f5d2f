// exp, exp2 and tanh over a policy V of vector operations. Lane by lane the same arithmetic, wherever a value stands.
#pragma once

#include "halves.h"

namespace kt {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLog2E = 1.44269504f;

// exp(x) within 2 ulp; exactly 1 at 0, exactly 0 below -87.3, NaN where x is NaN; x is cut at 88.
template <class V>
KT_INLINE typename V::vf exp(typename V::vf x) {
    using vf = typename V::vf;
    const vf low = V::set1(-87.3f);
    const vf cut = V::min(V::set1(88.0f), V::max(low, x));  // x second: NaN survives
    const typename V::vi n = V::to_int(V::mul(cut, V::set1(kLog2E)));
    const vf nf = V::to_float_lanes(n);
    vf r = V::fnma(nf, V::set1(0.693359375f), cut);  // Source: Cephes expf
    r = V::fnma(nf, V::set1(-2.12194440e-4f), r);
    vf y = V::set1(1.9875691500e-4f);
    y = V::fma(y, r, V::set1(1.3981999507e-3f));
    y = V::fma(y, r, V::set1(8.3334519073e-3f));
    y = V::fma(y, r, V::set1(4.1665795894e-2f));
    y = V::fma(y, r, V::set1(1.6666665459e-1f));
    y = V::fma(y, r, V::set1(5.0000001201e-1f));
    y = V::add(V::fma(y, V::mul(r, r), r), V::set1(1.0f));
    y = V::mul(y, V::power_of_two(n));
    return V::select(V::less(x, low), V::set1(0.0f), y);
}

// 2^x within 2 ulp for x at most 0, in half the operations of `exp`; exactly 1 at 0, exactly 0 below -126.5, NaN where
// x is NaN. Adding 1.5 * 2^23 + 127 rounds x to an integer n whose last bits are the exponent field of 2^n.
template <class V>
KT_INLINE typename V::vf exp2_falling(typename V::vf x) {
    using vf = typename V::vf;
    const vf magic = V::set1(12583039.0f);
    const vf cut = V::max(V::set1(-127.0f), x);  // x second: NaN survives
    const vf shifted = V::add(cut, magic);
    const vf r = V::sub(cut, V::sub(shifted, magic));
    vf y = V::set1(1.535336188319500e-4f);  // Source: Cephes exp2f
    y = V::fma(y, r, V::set1(1.339887440266574e-3f));
    y = V::fma(y, r, V::set1(9.618437357674640e-3f));
    y = V::fma(y, r, V::set1(5.550332471162809e-2f));
    y = V::fma(y, r, V::set1(2.402264791363012e-1f));
    y = V::fma(y, r, V::set1(6.931472028550421e-1f));
    y = V::fma(y, r, V::set1(1.0f));
    return V::mul(y, V::bits_to_exponent(shifted));
}

template <class V>
inline float exp2_falling_one(float x) {
    return V::first(exp2_falling<V>(V::set1(x)));
}

template <class V>
KT_INLINE typename V::vf tanh(typename V::vf x) {
    using vf = typename V::vf;
    const vf size = V::abs(x);
    const vf z = V::mul(x, x);
    vf small = V::set1(-5.70498872745e-3f);  // Source: Cephes tanhf, for |x| < 0.625
    small = V::fma(small, z, V::set1(2.06390887954e-2f));
    small = V::fma(small, z, V::set1(-5.37397155531e-2f));
    small = V::fma(small, z, V::set1(1.33314422036e-1f));
    small = V::fma(small, z, V::set1(-3.33332819422e-1f));
    small = V::fma(V::mul(small, z), x, x);
    const vf grown = exp<V>(V::add(size, size));
    vf large = V::sub(V::set1(1.0f), V::div(V::set1(2.0f), V::add(grown, V::set1(1.0f))));
    large = V::select(V::less(x, V::set1(0.0f)), V::sub(V::set1(0.0f), large), large);
    return V::select(V::less(size, V::set1(0.625f)), small, large);
}

}  // namespace
}  // namespace kt
