// Writes one head of a full block in its sealed form. One algorithm, over a policy V of operations.
#pragma once

#include "calls.h"
#include "tiles.h"

namespace kt {
namespace {

struct Source {
    const uint8_t* rows;
    int64_t stride;  // elements
    Form form;

    const uint8_t* row(int64_t index) const { return rows + index * stride * element_bytes(form); }
};

// codes = round(row / scale), scale = largest magnitude / 127 rounded to fp16. Returns the scale's bits.
// A zero row has scale 0; a row with an infinity or a NaN has that as its scale, so that it reads back as NaN.
template <class V>
inline uint16_t quantise_row(const Source& source, int64_t index, int size, int8_t* codes) {
    alignas(64) float row[kMaxHeadSize];
    load_row<V>(source.form, source.row(index), size, row);
    const uint16_t bits = float_to_half(largest_magnitude<V>(row, size) / 127.0f);
    const float scale = half_to_float(bits);
    if (!(scale > 0.0f && scale < __builtin_inff())) {
        std::memset(codes, 0, static_cast<size_t>(padded(size)));
        return bits;
    }
    for (int c = 0; c < size; c += V::W) {
        const typename V::vf code = V::div(V::load(row + c), V::set1(scale));
        V::store_int8(codes + c, V::to_int(V::min(V::max(code, V::set1(-127.0f)), V::set1(127.0f))));
    }
    return bits;
}

// [16 tokens][size] -> [size / 4][16 tokens][4 channels]
inline void write_key_tile(const int8_t (*codes)[kMaxHeadSize], int size, uint8_t* to) {
    for (int c = 0; c < size; c += kTileDepth) {
        for (int t = 0; t < kKeyTileTokens; ++t, to += kTileDepth) std::memcpy(to, codes[t] + c, kTileDepth);
    }
}

// [16 tokens][size] -> [4][size][4 tokens]
inline void write_value_tiles(const int8_t (*codes)[kMaxHeadSize], int size, uint8_t* to) {
    for (int t = 0; t < kKeyTileTokens; t += kTileDepth) {
        for (int c = 0; c < size; ++c, to += kTileDepth) {
            const uint32_t four = static_cast<uint8_t>(codes[t][c]) | static_cast<uint8_t>(codes[t + 1][c]) << 8 |
                                  static_cast<uint8_t>(codes[t + 2][c]) << 16 |
                                  static_cast<uint32_t>(static_cast<uint8_t>(codes[t + 3][c])) << 24;
            std::memcpy(to, &four, 4);
        }
    }
}

template <class V>
void seal_section(const Section& to, const Source& from, int size, int tokens, bool keys) {
    if (to.form != Form::int8) {
        if (from.rows == to.rows) return;
        const auto bytes = static_cast<size_t>(size * element_bytes(to.form));
        for (int t = 0; t < tokens; ++t) std::memcpy(to.rows + t * bytes, from.row(t), bytes);
        return;
    }
    alignas(64) int8_t codes[kKeyTileTokens][kMaxHeadSize];
    for (int t = 0; t < tokens; t += kKeyTileTokens) {
        for (int i = 0; i < kKeyTileTokens; ++i) to.scales[t + i] = quantise_row<V>(from, t + i, size, codes[i]);
        uint8_t* tile = to.rows + int64_t{t} * size;
        if (keys) {
            write_key_tile(codes, size, tile);
        } else {
            write_value_tiles(codes, size, tile);
        }
    }
}

template <class V>
void seal(const NewRows& fresh, const Seal& what, int head) {
    const Batch& batch = *fresh.batch;
    const Heads& heads = batch.heads;
    const Page page = batch.page(what.block, fresh.column);
    Source k{nullptr, fresh.k.token_stride, fresh.form}, v{nullptr, fresh.v.token_stride, fresh.form};
    if (what.row >= 0) {
        k.rows = fresh.k.at(what.row, head, fresh.form);
        v.rows = fresh.v.at(what.row, head, fresh.form);
    } else {
        const Page open = batch.open_page(what.block, fresh.column);
        if (open.address == nullptr) return;  // full forms were stored in place
        k = {k_section(open, heads, head).rows, heads.k_size, open.k_form};
        v = {v_section(open, heads, head).rows, heads.v_size, open.v_form};
    }
    seal_section<V>(k_section(page, heads, head), k, heads.k_size, heads.block_tokens, true);
    seal_section<V>(v_section(page, heads, head), v, heads.v_size, heads.block_tokens, false);
}

}  // namespace
}  // namespace kt
