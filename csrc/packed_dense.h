// The product of few rows with weights that are not packed, over a policy V of vector operations.
// A row's sum is taken in the same order however many rows are beside it.
#pragma once

#include "math.h"
#include "packed.h"

namespace kt {
namespace {

template <class V, class T, int R>
KT_INLINE void dot_rows(const T* weights, const DenseProduct& product, int64_t first_row, float (&dots)[R]) {
    using vf = typename V::vf;
    const int64_t size = product.num_inputs;
    const float* x[R];
    vf even[R], odd[R];
    for (int r = 0; r < R; ++r) {
        x[r] = reinterpret_cast<const float*>(product.x.at(first_row + r));
        even[r] = odd[r] = V::set1(0.0f);
    }
    int64_t i = 0;
    for (; i + 2 * V::W <= size; i += 2 * V::W) {
        const vf first = V::load(weights + i), second = V::load(weights + i + V::W);
        for (int r = 0; r < R; ++r) {
            even[r] = V::fma(first, V::load(x[r] + i), even[r]);
            odd[r] = V::fma(second, V::load(x[r] + i + V::W), odd[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        dots[r] = V::reduce_add(V::add(even[r], odd[r]));
        for (int64_t rest = i; rest < size; ++rest) dots[r] += to_float(weights[rest]) * x[r][rest];
    }
}

template <class V, class T, int R>
void multiply_dense_rows(const DenseProduct& product, const T* weights, int64_t first_row, int64_t output) {
    float dots[R];
    dot_rows<V, T, R>(weights, product, first_row, dots);
    for (int r = 0; r < R; ++r) {
        const float sum = product.bias == nullptr ? dots[r] : dots[r] + product.bias[output];
        uint8_t* to = product.out.at(first_row + r) + output * element_bytes(product.out.form);
        if (product.out.form == Form::fp32) {
            from_float(sum, reinterpret_cast<float*>(to));
        } else if (product.out.form == Form::bf16) {
            from_float(sum, reinterpret_cast<bf16*>(to));
        } else {
            from_float(sum, reinterpret_cast<fp16*>(to));
        }
    }
}

template <class V, class T>
void multiply_dense_output(const DenseProduct& product, int64_t output) {
    const auto* weights = reinterpret_cast<const T*>(product.weights.at(output));
    int64_t row = 0;
    for (; row + kRowsAtOnce <= product.num_rows; row += kRowsAtOnce) {
        multiply_dense_rows<V, T, kRowsAtOnce>(product, weights, row, output);
    }
    for (; row < product.num_rows; ++row) multiply_dense_rows<V, T, 1>(product, weights, row, output);
}

template <class V>
void multiply_dense(const DenseProduct& product, int64_t output) {
    if (product.weights.form == Form::fp32) return multiply_dense_output<V, float>(product, output);
    if (product.weights.form == Form::bf16) return multiply_dense_output<V, bf16>(product, output);
    multiply_dense_output<V, fp16>(product, output);
}

}  // namespace
}  // namespace kt
