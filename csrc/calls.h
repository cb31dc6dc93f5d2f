// What a call is: plain pointers and sizes, as `kernels/batch.py` documents them. Owns nothing.
#pragma once

#include "forms.h"

namespace kt {

// Rows of a tensor [T, heads, size] whose last dimension is contiguous; strides in elements.
struct Rows {
    uint8_t* data;
    int64_t token_stride, head_stride;

    KT_INLINE uint8_t* at(int64_t token, int64_t head, Form form) const {
        return data + (token * token_stride + head * head_stride) * element_bytes(form);
    }
};

struct Entry {
    int32_t block, first_row, rows, shift;
};
struct Seal {
    int32_t block, row;
};

struct Batch {
    const int64_t* page_table;
    const int64_t* open_table;
    int64_t num_blocks, num_columns;
    const int64_t* slots;
    int64_t num_tokens;
    const int32_t* query_starts;
    const int32_t* context_lens;
    int64_t num_sequences;
    const int32_t* entry_starts;
    const Entry* entries;
    int64_t num_entries;
    const Seal* seals;
    int64_t num_seals;
    Heads heads;

    KT_INLINE Page page(int64_t block, int column) const {
        return unpack_page(page_table[block * num_columns + column]);
    }
    KT_INLINE Page open_page(int64_t block, int column) const {
        return unpack_page(open_table[block * num_columns + column]);
    }
};

// New rows of one layer, in the model's form.
struct NewRows {
    const Batch* batch;
    int column;
    Rows k, v;
    Form form;
    int num_threads;
};

struct Rope {
    const float* cosines;  // [shifts][half]
    const float* sines;
    const int32_t* shifts;  // distinct non-zero shifts of the batch, ascending
    int num_shifts, half;
    bool interleaved;
};

struct AttentionCall {
    NewRows fresh;
    Rows q, out;  // in the form of the new rows
    int num_heads;
    float scale;
    int window;         // 0: all
    float softcap;      // 0: none
    const float* sinks;  // null: none
    Rope rope;
    bool prefetch;  // call for the next page while one is worked on; off only to measure what it is worth
};

// Consecutive new tokens of one sequence whose own block-table entry is the same: they read the same bytes.
struct Tile {
    int32_t sequence;
    int32_t first_token;  // row of q
    int32_t num_tokens;
    int32_t logical;  // logical index of the first token
    int32_t first_entry, own_entry;
};

// One piece of work: a tile, a KV head, and a range of partial groups.
// `partials` null: all groups, and the output is written; else the groups' partials are written there, one by one.
struct Item {
    const Tile* tile;
    const int32_t* entry_logical;  // logical index of every entry's first row
    int32_t head;
    int32_t first_group, last_group;  // inclusive, counted from the sequence's first entry
    float* partials;
};

// (acc [rows, padded Dv], m [rows], l [rows]) of one group.
static inline int64_t partial_floats(int rows, int v_size) {
    return round_up(int64_t{rows} * (padded(v_size) + 2), kRowPadding);
}

// Scratch of one thread, in bytes, for tiles of at most `rows` query rows.
int64_t scratch_bytes(int rows, const Heads& heads);

struct NormCall;  // decoder_calls.h
struct RotateCall;
struct GateCall;

// The kernels of one instruction set.
struct Kernels {
    const char* name;
    void (*attend)(const AttentionCall&, const Item&, uint8_t* scratch);
    // Merges the partials of all groups of (tile, head) in order and writes the output rows.
    void (*merge)(const AttentionCall&, const Item&, uint8_t* scratch);
    void (*seal)(const NewRows&, const Seal&, int head);
    // One row each.
    void (*norm)(const NormCall&, int64_t row);
    void (*rotate)(const RotateCall&, int64_t token);
    void (*gate)(const GateCall&, int64_t row);
};

extern const Kernels kPortable;
#ifdef KT_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

// Entry points; throw std::invalid_argument where the batch contradicts itself.
void store_kv(const NewRows& rows);
void check_slots(const NewRows& rows);  // of all rows, before the first one is stored
void store_new_row(const NewRows& rows, int64_t token);
void seal_blocks(const Kernels& kernels, const NewRows& rows);
void paged_attention(const Kernels& kernels, const AttentionCall& call);

}  // namespace kt
