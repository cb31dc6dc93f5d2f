// Forms, page sections and constants: the C++ half of `ktransformer2/layout.py`. Knows no instruction set.
//
// Everything in the headers that the per-instruction-set files include is `static` or in an unnamed namespace: a plain
// inline function compiled with AVX flags could be the copy that the linker keeps for machines without AVX. What is
// defined in a class is such a function, so it is KT_INLINE.
#pragma once

#include <cstddef>
#include <cstdint>

// For the arithmetic inside the innermost loops, where a call costs more than the work; and for prefetches, which GCC
// drops when they stand in a function of their own ("it has no effect").
#define KT_INLINE inline __attribute__((always_inline))

namespace kt {

enum class Form : int { absent = 0, fp32 = 1, bf16 = 2, fp16 = 3, int8 = 4 };

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

constexpr int kKeyTileTokens = 16;
constexpr int kTileDepth = 4;  // channels of a key tile, tokens of a value tile
constexpr int kEntriesPerPartial = 8;
// Larger blocks are worked through in pieces of this many rows, so that int32 sums and scratch stay bounded.
constexpr int kSpanTokens = 64;
constexpr int kMaxHeadSize = 256;
constexpr int kRowPadding = 16;  // scratch rows are padded to the widest vector

template <class T>
static inline T smaller(T a, T b) {
    return a < b ? a : b;
}
template <class T>
static inline T larger(T a, T b) {
    return a > b ? a : b;
}
static inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
static inline int padded(int size) { return static_cast<int>(round_up(size, kRowPadding)); }

static inline bool is_full(Form form) { return form == Form::fp32 || form == Form::bf16 || form == Form::fp16; }
static inline int element_bytes(Form form) {
    return form == Form::fp32 ? 4 : form == Form::int8 ? 1 : form == Form::absent ? 0 : 2;
}

struct Heads {
    int num_kv_heads, k_size, v_size, block_tokens;
};

// A page-table entry taken apart. Sections: K | K scales | V | V scales, each on a 64-byte boundary.
struct Page {
    uint8_t* address;
    Form k_form, v_form;

    KT_INLINE bool both_full() const { return is_full(k_form) && is_full(v_form); }
};

static inline Page unpack_page(int64_t entry) {
    return {reinterpret_cast<uint8_t*>(entry & ~int64_t{63}), static_cast<Form>(entry & 7),
            static_cast<Form>(entry >> 3 & 7)};
}

// One head's section of a page: rows of a full form, or codes and scales.
struct Section {
    uint8_t* rows;
    uint16_t* scales;  // int8 only
    Form form;
};

static inline int64_t section_bytes(Form form, const Heads& heads, int size) {
    const int64_t tokens = int64_t{heads.num_kv_heads} * heads.block_tokens;
    const int64_t scales = is_full(form) ? 0 : tokens * 2;
    return round_up(tokens * size * element_bytes(form), 64) + round_up(scales, 64);
}

static inline Section head_section(uint8_t* section, Form form, const Heads& heads, int size, int head) {
    const int64_t head_rows = int64_t{head} * heads.block_tokens;
    const int64_t codes = int64_t{heads.num_kv_heads} * heads.block_tokens * size * element_bytes(form);
    auto* scales = reinterpret_cast<uint16_t*>(section + round_up(codes, 64)) + head_rows;
    return {section + head_rows * size * element_bytes(form), form == Form::int8 ? scales : nullptr, form};
}

static inline Section k_section(const Page& page, const Heads& heads, int head) {
    return head_section(page.address, page.k_form, heads, heads.k_size, head);
}

static inline Section v_section(const Page& page, const Heads& heads, int head) {
    return head_section(page.address + section_bytes(page.k_form, heads, heads.k_size), page.v_form, heads,
                        heads.v_size, head);
}

}  // namespace kt
