// One row of a norm, of a rotation, of a gate, over a policy V of vector operations. Rounds where transformers does: each
// product and sum becomes a value of the rows' form before it goes on.
#pragma once

#include <type_traits>

#include "decoder_calls.h"
#include "tiles.h"

namespace kt {
namespace {

// The first n of W lanes; the others are 0.
template <class V, class T>
KT_INLINE typename V::vf load_lanes(const T* from, int n) {
    if (n >= V::W) return V::load(from);
    float lanes[V::W] = {};
    for (int i = 0; i < n; ++i) lanes[i] = to_float(from[i]);
    return V::load(lanes);
}

template <class V, class T>
KT_INLINE void store_lanes(T* to, typename V::vf x, int n) {
    if (n >= V::W) return V::store(to, x);
    float lanes[V::W];
    V::store(lanes, x);
    for (int i = 0; i < n; ++i) from_float(lanes[i], to + i);
}

template <class V, class T>
KT_INLINE typename V::vf rounded(typename V::vf x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else {
        T lanes[V::W];
        V::store(lanes, x);
        return V::load(lanes);
    }
}

template <class V, class T>
inline void norm_values(const T* x, T* residual, const T* weight, T* out, int size, float eps) {
    typename V::vf squares = V::set1(0.0f);
    for (int i = 0; i < size; i += V::W) {
        typename V::vf value = load_lanes<V>(x + i, size - i);
        if (residual != nullptr) {
            value = rounded<V, T>(V::add(load_lanes<V>(residual + i, size - i), value));
            store_lanes<V>(residual + i, value, size - i);
        }
        squares = V::fma(value, value, squares);
    }
    const T* from = residual != nullptr ? residual : x;
    const auto scale = V::set1(1.0f / __builtin_sqrtf(V::reduce_add(squares) / static_cast<float>(size) + eps));
    for (int i = 0; i < size; i += V::W) {
        const auto normed = rounded<V, T>(V::mul(load_lanes<V>(from + i, size - i), scale));
        store_lanes<V>(out + i, V::mul(load_lanes<V>(weight + i, size - i), normed), size - i);
    }
}

template <class V>
void norm(const NormCall& call, int64_t row) {
    const int64_t at = row * call.size * element_bytes(call.form);
    with_form(call.form, call.x + at, [&](auto* x) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(x)>>;
        auto* residual = call.residual == nullptr ? nullptr : reinterpret_cast<T*>(call.residual + at);
        norm_values<V>(x, residual, reinterpret_cast<const T*>(call.weight), reinterpret_cast<T*>(call.out + at),
                       call.size, call.eps);
    });
}

// Channel i with channel i + half, for i < half.
template <class V, class T>
inline void rotate_head(T* head, const float* cosines, const float* sines, int half) {
    for (int i = 0; i < half; i += V::W) {
        const int n = half - i;
        const auto first = load_lanes<V>(head + i, n), second = load_lanes<V>(head + half + i, n);
        const auto cosine = load_lanes<V>(cosines + i, n), sine = load_lanes<V>(sines + i, n);
        const auto left = rounded<V, T>(V::mul(first, cosine)), right = rounded<V, T>(V::mul(second, sine));
        const auto up = rounded<V, T>(V::mul(second, cosine)), across = rounded<V, T>(V::mul(first, sine));
        store_lanes<V>(head + i, V::sub(left, right), n);
        store_lanes<V>(head + half + i, V::add(up, across), n);
    }
}

template <class V>
void rotate(const RotateCall& call, int64_t token) {
    const float* cosines = call.cosines + token * call.half;
    const float* sines = call.sines + token * call.half;
    const Heads& heads = call.fresh.batch->heads;
    const Form form = call.fresh.form;
    const auto all = [&](const Rows& rows, int num_heads, const uint8_t* weight) {
        for (int head = 0; head < num_heads; ++head) {
            with_form(form, rows.at(token, head, form), [&](auto* typed) {
                using T = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
                T* values = const_cast<T*>(typed);
                if (weight != nullptr) {
                    norm_values<V, T>(values, nullptr, reinterpret_cast<const T*>(weight), values, heads.k_size,
                                      call.eps);
                }
                rotate_head<V>(values, cosines, sines, call.half);
            });
        }
    };
    all(call.q, call.num_heads, call.q_weight);
    all(call.fresh.k, heads.num_kv_heads, call.k_weight);
}

template <class V>
void gate(const GateCall& call, int64_t row) {
    const int bytes = element_bytes(call.form);
    with_form(call.form, call.gate_up + row * 2 * call.size * bytes, [&](auto* gates) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(gates)>>;
        const T* ups = gates + call.size;
        T* out = reinterpret_cast<T*>(call.out + row * call.size * bytes);
        const auto one = V::set1(1.0f), zero = V::set1(0.0f);
        for (int i = 0; i < call.size; i += V::W) {
            const int n = call.size - i;
            const auto x = load_lanes<V>(gates + i, n);
            const auto silu = rounded<V, T>(V::div(x, V::add(one, exp<V>(V::sub(zero, x)))));
            store_lanes<V>(out + i, V::mul(silu, load_lanes<V>(ups + i, n)), n);
        }
    });
}

}  // namespace
}  // namespace kt
