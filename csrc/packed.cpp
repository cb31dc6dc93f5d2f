// The product of rows with packed weights: rows become codes a block at a time, then threads share the tiles.
#include "packed.h"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "dispatch.h"
#include "parallel.h"

namespace kt {
namespace {

// So many rows at 1,536 inputs are 120 KB of codes: they stay in the second cache while every tile passes once.
constexpr int64_t kRowsPerBlock = 64;
constexpr int kPiecesPerThread = 4;  // pieces of tiles, so that a thread that is held up does not hold up the others

int64_t coded_row_bytes(int64_t groups) { return groups * (kGroupInputs + int64_t{sizeof(float) + sizeof(int32_t)}); }

CodedRows carve_rows(uint8_t* scratch, int64_t rows, int64_t groups) {
    auto* scales = reinterpret_cast<float*>(scratch);
    auto* sums = reinterpret_cast<int32_t*>(scales + rows * groups);
    return {reinterpret_cast<int8_t*>(sums + rows * groups), scales, sums, groups};
}

void multiply_block(const PackedKernels& kernels, const Product& product, const CodedRows& rows, int64_t first,
                    int64_t count) {
    const PackedMatrix& matrix = *product.matrix;
    const auto code = [&](int64_t row, int) {
        kernels.code_row(product.x.at(first + row), product.x.form, matrix.num_inputs, rows.from(row));
    };
    for_each(count, thread_count(product.num_threads, count * matrix.num_inputs / 4), 4, code);
    const int64_t tiles = matrix.num_tiles(), bytes = tiles * matrix.tile_bytes();
    const int threads = thread_count(product.num_threads, larger(bytes / 8, bytes * count / 32));
    const int64_t grain = larger<int64_t>(tiles / (threads * kPiecesPerThread), 1);
    for_each(tiles, threads, grain,
             [&](int64_t tile, int) { kernels.multiply(product, rows, first, count, tile); });
}

}  // namespace

const PackedKernels& packed_kernels_named(const char* name) {
    kernels_named(name);
#ifdef KT_X86
    for (const PackedKernels* kernels : {&kPackedAvx512, &kPackedAvx2}) {
        if (std::strcmp(kernels->name, name) == 0) return *kernels;
    }
#endif
    return kPackedPortable;
}

void multiply_packed(const PackedKernels& kernels, const Product& product) {
    if (!is_full(product.x.form) || !is_full(product.out.form)) {
        throw std::invalid_argument("rows come and go as fp32, bf16 or fp16");
    }
    const int64_t groups = product.matrix->num_groups();
    const int64_t block = smaller(product.num_rows, kRowsPerBlock);
    const std::unique_ptr<uint8_t[]> scratch(new uint8_t[static_cast<size_t>(block * coded_row_bytes(groups))]);
    const CodedRows rows = carve_rows(scratch.get(), block, groups);
    for (int64_t first = 0; first < product.num_rows; first += block) {
        multiply_block(kernels, product, rows, first, smaller(block, product.num_rows - first));
    }
}

void multiply_dense(const PackedKernels& kernels, const DenseProduct& product) {
    if (product.x.form != Form::fp32 || !is_full(product.weights.form) || !is_full(product.out.form)) {
        throw std::invalid_argument("rows come as fp32; weights and results are fp32, bf16 or fp16");
    }
    const int64_t row_bytes = product.num_inputs * element_bytes(product.weights.form);
    const int64_t bytes = product.num_outputs * row_bytes;
    const int threads = thread_count(product.num_threads, larger(bytes / 8, bytes * product.num_rows / 32));
    const int64_t grain = larger<int64_t>(product.num_outputs / (threads * kPiecesPerThread), 1);
    for_each(product.num_outputs, threads, grain,
             [&](int64_t output, int) { kernels.multiply_dense(product, output); });
}

}  // namespace kt
