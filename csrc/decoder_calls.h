// The arithmetic between a decoder's projections: plain pointers and sizes, as `kernels/decoder.py` documents them.
#pragma once

#include "calls.h"

namespace kt {

// Contiguous rows [rows, size]. With a residual, x is added to it in place and the sum is what is normed.
struct NormCall {
    const uint8_t* x;
    uint8_t* residual;  // null: none
    const uint8_t* weight;
    uint8_t* out;
    int64_t rows;
    int size;
    Form form;
    float eps;
    int num_threads;
};

// Queries and keys of the new rows are normed and rotated where they lie, then keys and values are stored.
struct RotateCall {
    NewRows fresh;
    Rows q;
    int num_heads;
    const float* cosines;  // [T, half]
    const float* sines;
    int half;
    const uint8_t* q_weight;  // null: queries and keys are not normed
    const uint8_t* k_weight;
    float eps;
};

// Contiguous rows: gate_up [rows, 2 * size], out [rows, size].
struct GateCall {
    const uint8_t* gate_up;
    uint8_t* out;
    int64_t rows;
    int size;
    Form form;
    int num_threads;
};

void norm_rows(const Kernels& kernels, const NormCall& call);
// Throws std::invalid_argument where the batch contradicts itself.
void rotate_and_store(const Kernels& kernels, const RotateCall& call);
void gate_rows(const Kernels& kernels, const GateCall& call);

}  // namespace kt
