// Packed weights and the product of rows with them: plain pointers and sizes. Owns nothing. See kernels/linear.py.
//
// A matrix [outputs, inputs] lies in tiles of 16 outputs. A tile holds for each group of 32 inputs its scales and its
// codes, first all scales, then all codes, both parts on a 64-byte boundary:
//   int8  scales [groups][16] fp16      codes [groups][8 chunks][16 outputs][4 inputs] int8     weight = code * scale
//   int4  scales [groups][2][16] fp16   codes [groups][4 chunks][16 outputs][4 inputs] uint8
//         chunk c in the low nibbles, chunk c + 4 in the high ones                     weight = code * scale + least
// What is missing of the last tile and the last group is 0.
#pragma once

#include "forms.h"

namespace kt {

constexpr int kTileOutputs = 16;
constexpr int kGroupInputs = 32;
constexpr int kChunkInputs = 4;
constexpr int kChunkBytes = kTileOutputs * kChunkInputs;
constexpr int kRowsAtOnce = 4;  // rows that share a code once it is in a register

struct PackedMatrix {
    const uint8_t* tiles;
    const float* bias;  // null: none
    int64_t num_outputs, num_inputs;
    bool int4;

    KT_INLINE int64_t num_tiles() const { return (num_outputs + kTileOutputs - 1) / kTileOutputs; }
    KT_INLINE int64_t num_groups() const { return (num_inputs + kGroupInputs - 1) / kGroupInputs; }
    KT_INLINE int64_t group_bytes() const { return int64_t{kGroupInputs / kChunkInputs} * kChunkBytes / (int4 ? 2 : 1); }
    KT_INLINE int64_t scale_bytes() const { return round_up(num_groups() * kTileOutputs * 2 * (int4 ? 2 : 1), 64); }
    KT_INLINE int64_t tile_bytes() const { return scale_bytes() + num_groups() * group_bytes(); }
};

// Rows of a matrix whose last dimension is contiguous; the stride in elements.
struct MatrixRows {
    uint8_t* data;
    int64_t stride;
    Form form;

    KT_INLINE uint8_t* at(int64_t row) const { return data + row * stride * element_bytes(form); }
};

struct Product {
    const PackedMatrix* matrix;
    MatrixRows x, out;
    int64_t num_rows;
    int num_threads;
};

// Rows as codes of 8 bits: value = code * scale, one scale for a group of 32. What is missing of the last group is 0.
struct CodedRows {
    int8_t* codes;   // [rows][groups * 32]
    float* scales;   // [rows][groups]
    int32_t* sums;   // [rows][groups], of the codes
    int64_t num_groups;

    KT_INLINE CodedRows from(int64_t row) const {
        return {codes + row * num_groups * kGroupInputs, scales + row * num_groups, sums + row * num_groups,
                num_groups};
    }
};

// Rows times weights [outputs][inputs] in fp32, bf16 or fp16, as they lie.
struct DenseProduct {
    MatrixRows weights;
    const float* bias;  // null: none
    MatrixRows x, out;  // x in fp32
    int64_t num_rows, num_inputs, num_outputs;
    int num_threads;
};

// The kernels of one instruction set, by the name it has in `Kernels`.
struct PackedKernels {
    const char* name;
    void (*code_row)(const uint8_t* row, Form form, int64_t size, const CodedRows& to);
    // The products of `num_rows` rows from `first_row` on with the 16 outputs of a tile, written to `out`.
    void (*multiply)(const Product&, const CodedRows&, int64_t first_row, int64_t num_rows, int64_t tile);
    // The products of all rows with one output's weights, written to `out`.
    void (*multiply_dense)(const DenseProduct&, int64_t output);
};

extern const PackedKernels kPackedPortable;
#ifdef KT_X86
extern const PackedKernels kPackedAvx2;
extern const PackedKernels kPackedAvx512;
#endif

// Throws std::invalid_argument where this processor cannot run them.
const PackedKernels& packed_kernels_named(const char* name);

// out[row, output] = sum over inputs of x[row, input] * weight[output, input], plus bias, in the form of `out`.
// A row's result depends on the row, the weights and the instruction set alone.
void multiply_packed(const PackedKernels& kernels, const Product& product);
// The same with weights that are not packed; for few rows.
void multiply_dense(const PackedKernels& kernels, const DenseProduct& product);

}  // namespace kt
