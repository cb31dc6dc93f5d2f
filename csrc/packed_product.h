// The product of rows with packed weights, over a policy V of vector operations that adds to those of `ops_*.h`:
//   dots8<R>, dots4<R>(codes, x, sums, dots): for W outputs the integer sums over one group, of R rows.
// Integer sums are exact and groups are added in order, each output in a lane of its own, so that a row's result does
// not depend on how many rows are beside it.
#pragma once

#include "math.h"
#include "packed.h"

namespace kt {
namespace {

constexpr float kLargestCode = 127.0f;
constexpr float kSmallestGroup = 1e-30f;  // a group below it counts as zeros: its inverse would be infinite

template <class V, class T>
KT_INLINE void code_group(const T* x, const CodedRows& to, int64_t group) {
    using vf = typename V::vf;
    vf most = V::set1(0.0f), poison = V::set1(0.0f);
    for (int i = 0; i < kGroupInputs; i += V::W) {
        const vf values = V::load(x + i);
        most = V::max(most, V::abs(values));
        poison = V::fma(values, V::set1(0.0f), poison);  // NaN where a value is not finite: the output shall show it
    }
    const float largest = V::reduce_max(most);
    const vf inverse = V::set1(largest > kSmallestGroup ? kLargestCode / largest : 0.0f);
    vf sum = V::set1(0.0f);
    int8_t* codes = to.codes + group * kGroupInputs;
    for (int i = 0; i < kGroupInputs; i += V::W) {
        const typename V::vi rounded = V::to_int(V::mul(V::load(x + i), inverse));
        sum = V::add(sum, V::to_float_lanes(rounded));
        V::store_int8(codes + i, rounded);
    }
    to.scales[group] = largest / kLargestCode + V::reduce_add(poison);
    to.sums[group] = static_cast<int32_t>(V::reduce_add(sum));
}

template <class V, class T>
void code_row_of(const T* x, int64_t size, const CodedRows& to) {
    const int64_t whole = size / kGroupInputs;
    for (int64_t group = 0; group < whole; ++group) code_group<V>(x + group * kGroupInputs, to, group);
    if (whole == to.num_groups) return;
    float rest[kGroupInputs] = {};
    for (int64_t i = whole * kGroupInputs; i < size; ++i) rest[i - whole * kGroupInputs] = to_float(x[i]);
    code_group<V>(rest, to, whole);
}

template <class V>
void code_row(const uint8_t* row, Form form, int64_t size, const CodedRows& to) {
    if (form == Form::fp32) return code_row_of<V>(reinterpret_cast<const float*>(row), size, to);
    if (form == Form::bf16) return code_row_of<V>(reinterpret_cast<const bf16*>(row), size, to);
    code_row_of<V>(reinterpret_cast<const fp16*>(row), size, to);
}

// Products of R rows with W outputs of a tile, from output `lane` of the tile on; without bias.
template <class V, bool kInt4, int R>
KT_INLINE void multiply_lanes(const PackedMatrix& matrix, const uint8_t* tile, int lane, const CodedRows& rows,
                              float (*to)[kTileOutputs]) {
    using vf = typename V::vf;
    const int64_t groups = rows.num_groups;
    const auto* scales = reinterpret_cast<const fp16*>(tile) + lane;
    const uint8_t* codes = tile + matrix.scale_bytes() + lane * kChunkInputs;
    vf totals[R];
    for (int r = 0; r < R; ++r) totals[r] = V::set1(0.0f);
    for (int64_t group = 0; group < groups; ++group) {
        const int8_t* x[R];
        int32_t sums[R];
        typename V::vi dots[R];
        for (int r = 0; r < R; ++r) {
            x[r] = rows.codes + (r * groups + group) * kGroupInputs;
            sums[r] = rows.sums[r * groups + group];
        }
        if constexpr (kInt4) {
            V::template dots4<R>(codes, x, dots);
        } else {
            V::template dots8<R>(codes, x, sums, dots);
        }
        const vf scale = V::load(scales);
        for (int r = 0; r < R; ++r) {
            const vf both = V::mul(scale, V::set1(rows.scales[r * groups + group]));
            totals[r] = V::fma(both, V::to_float_lanes(dots[r]), totals[r]);
        }
        if constexpr (kInt4) {
            const vf least = V::load(scales + kTileOutputs);
            for (int r = 0; r < R; ++r) {
                const float sum = rows.scales[r * groups + group] * static_cast<float>(sums[r]);
                totals[r] = V::fma(least, V::set1(sum), totals[r]);
            }
        }
        scales += kTileOutputs * (kInt4 ? 2 : 1);
        codes += matrix.group_bytes();
    }
    for (int r = 0; r < R; ++r) V::store(to[r] + lane, totals[r]);
}

template <class V, class T>
void write_outputs(const float* from, T* to, int64_t count) {
    if (count == kTileOutputs) {
        for (int i = 0; i < kTileOutputs; i += V::W) V::store(to + i, V::load(from + i));
    } else {
        for (int64_t i = 0; i < count; ++i) from_float(from[i], to + i);
    }
}

// One tile's outputs of a row, with bias, rounded to the form that is asked for.
template <class V>
void finish(const Product& product, const float* values, int64_t row, int64_t first_output) {
    const PackedMatrix& matrix = *product.matrix;
    const int64_t count = smaller<int64_t>(kTileOutputs, matrix.num_outputs - first_output);
    float sums[kTileOutputs];
    for (int64_t i = 0; i < count; ++i) {
        sums[i] = matrix.bias == nullptr ? values[i] : values[i] + matrix.bias[first_output + i];
    }
    uint8_t* to = product.out.at(row) + first_output * element_bytes(product.out.form);
    if (product.out.form == Form::fp32) return write_outputs<V>(sums, reinterpret_cast<float*>(to), count);
    if (product.out.form == Form::bf16) return write_outputs<V>(sums, reinterpret_cast<bf16*>(to), count);
    write_outputs<V>(sums, reinterpret_cast<fp16*>(to), count);
}

template <class V, bool kInt4, int R>
void multiply_rows(const Product& product, const CodedRows& rows, int64_t first_row, int64_t tile) {
    const PackedMatrix& matrix = *product.matrix;
    float values[R][kTileOutputs];
    const uint8_t* at = matrix.tiles + tile * matrix.tile_bytes();
    for (int lane = 0; lane < kTileOutputs; lane += V::W) {
        multiply_lanes<V, kInt4, R>(matrix, at, lane, rows, values);
    }
    for (int r = 0; r < R; ++r) finish<V>(product, values[r], first_row + r, tile * kTileOutputs);
}

template <class V, bool kInt4>
void multiply_tile(const Product& product, const CodedRows& rows, int64_t first_row, int64_t num_rows, int64_t tile) {
    int64_t row = 0;
    for (; row + kRowsAtOnce <= num_rows; row += kRowsAtOnce) {
        multiply_rows<V, kInt4, kRowsAtOnce>(product, rows.from(row), first_row + row, tile);
    }
    for (; row < num_rows; ++row) multiply_rows<V, kInt4, 1>(product, rows.from(row), first_row + row, tile);
}

template <class V>
void multiply(const Product& product, const CodedRows& rows, int64_t first_row, int64_t num_rows, int64_t tile) {
    if (product.matrix->int4) return multiply_tile<V, true>(product, rows, first_row, num_rows, tile);
    multiply_tile<V, false>(product, rows, first_row, num_rows, tile);
}

}  // namespace
}  // namespace kt
