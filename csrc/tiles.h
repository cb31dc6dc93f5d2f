// The two register tiles everything is made of, and the loops that bring rows into float scratch.
//
// A tile multiplies NR rows of `a` with a strip of `b`. Every output lane is a sum over the depth in one fixed order,
// so a value does not depend on NR nor on how the columns were cut.
#pragma once

#include "math.h"

namespace kt {
namespace {

constexpr int kMaxRows = 6;  // 6 x 2 accumulators, 2 vectors of b and one of a fill 16 registers

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls body(Count<n>) for a run-time 1 <= n <= kMaxRows.
template <class Body>
inline void with_rows(int n, Body body) {
    switch (n) {
        case 1: return body(Count<1>{});
        case 2: return body(Count<2>{});
        case 3: return body(Count<3>{});
        case 4: return body(Count<4>{});
        case 5: return body(Count<5>{});
        default: return body(Count<6>{});
    }
}

// W outputs per row: sum over groups of a[row][4 group + i] * b[group * stride + 4 lane + i], exact in int32.
// b holds 4 consecutive int8 per output and group (key tiles: channels; value tiles: tokens). `groups` is even.
// Per group 4 W bytes of b are read; with kPrefetch as many are called for from `ahead` on, so that what comes next
// arrives evenly spread over the work, not in bursts that the memory pipeline must wait for.
template <class V, int NR, bool kPrefetch, class Done>
KT_INLINE void int8_tile(const int16_t* a, int a_stride, const int8_t* b, int64_t b_stride, int groups,
                      const uint8_t* ahead, Done done) {
    typename V::vi acc[NR][2];
    for (int r = 0; r < NR; ++r) acc[r][0] = acc[r][1] = V::zero_int();
    for (int pair = 0; pair < groups; pair += 2) {
        if (kPrefetch) {
            for (int byte = 0; byte < 8 * V::W; byte += 64) V::prefetch(ahead + byte);
            ahead += 8 * V::W;
        }
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g, b += b_stride, a += 4) {
            const typename V::vs left = V::widen(b);
            const typename V::vs right = V::widen(b + 2 * V::W);
            for (int r = 0; r < NR; ++r) {
                const typename V::vs four = V::broadcast4(a + r * a_stride);
                V::add_dot(acc[r][0], left, four);
                V::add_dot(acc[r][1], right, four);
            }
        }
    }
    for (int r = 0; r < NR; ++r) done(r, V::to_float_lanes(V::pair_sum(acc[r][0], acc[r][1])));
}

// NC * W outputs per row: init + sum over k of a[row][k] * b[k * stride + lane], in the order of k.
template <class V, int NR, int NC, class Init, class Done>
KT_INLINE void float_tile(const float* a, int a_stride, const float* b, int64_t b_stride, int depth, Init init,
                       Done done) {
    typename V::vf acc[NR][NC];
    for (int r = 0; r < NR; ++r) {
        for (int c = 0; c < NC; ++c) acc[r][c] = init(r, c * V::W);
    }
    for (int k = 0; k < depth; ++k, b += b_stride) {
        typename V::vf strip[NC];
        for (int c = 0; c < NC; ++c) strip[c] = V::load(b + c * V::W);
        for (int r = 0; r < NR; ++r) {
            const typename V::vf one = V::set1(a[r * a_stride + k]);
            for (int c = 0; c < NC; ++c) acc[r][c] = V::fma(one, strip[c], acc[r][c]);
        }
    }
    for (int r = 0; r < NR; ++r) {
        for (int c = 0; c < NC; ++c) done(r, c * V::W, acc[r][c]);
    }
}

// to[0:size] = from, to[size:padded] = 0.
template <class V, class T>
inline void load_row(const T* from, int size, float* to) {
    int i = 0;
    for (; i + V::W <= size; i += V::W) V::store(to + i, V::load(from + i));
    for (; i < size; ++i) to[i] = to_float(from[i]);
    for (const int end = padded(size); i < end; ++i) to[i] = 0.0f;
}

template <class V, class T>
inline void store_row(const float* from, int size, T* to) {
    int i = 0;
    for (; i + V::W <= size; i += V::W) V::store(to + i, V::load(from + i));
    for (; i < size; ++i) from_float(from[i], to + i);
}

// Calls body with a typed pointer to rows of a full form.
template <class Body>
inline void with_form(Form form, const void* rows, Body body) {
    switch (form) {
        case Form::bf16: return body(static_cast<const bf16*>(rows));
        case Form::fp16: return body(static_cast<const fp16*>(rows));
        default: return body(static_cast<const float*>(rows));
    }
}

template <class V>
inline void load_row(Form form, const void* from, int size, float* to) {
    with_form(form, from, [&](auto* typed) { load_row<V>(typed, size, to); });
}

template <class V>
inline void store_row(const float* from, int size, Form form, void* to) {
    switch (form) {
        case Form::bf16: return store_row<V>(from, size, static_cast<bf16*>(to));
        case Form::fp16: return store_row<V>(from, size, static_cast<fp16*>(to));
        default: return store_row<V>(from, size, static_cast<float*>(to));
    }
}

// Largest magnitude of a padded row; NaN where one of its values is.
template <class V>
inline float largest_magnitude(const float* row, int size) {
    typename V::vf most = V::set1(0.0f), poison = V::set1(0.0f);
    for (int i = 0; i < padded(size); i += V::W) {
        const typename V::vf magnitude = V::abs(V::load(row + i));
        most = V::max(magnitude, most);
        poison = V::fma(V::min(V::set1(1.0f), magnitude), V::set1(0.0f), poison);
    }
    return V::reduce_max(most) + V::reduce_add(poison);
}

}  // namespace
}  // namespace kt
