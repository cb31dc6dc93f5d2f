// Puts new rows where they belong, and seals full blocks. Checks the batch; threads where the work is worth it.
#include <cstring>
#include <stdexcept>
#include <string>

#include "calls.h"
#include "parallel.h"

namespace kt {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// Where a block's rows lie as computed; absent: nowhere, `seal` will take them from the new tensors.
Page writable_page(const NewRows& rows, int64_t block) {
    const Batch& batch = *rows.batch;
    Page page = batch.open_page(block, rows.column);
    if (page.address == nullptr) page = batch.page(block, rows.column);
    if (page.address == nullptr || !page.both_full()) return {nullptr, Form::absent, Form::absent};
    if (page.k_form != rows.form || page.v_form != rows.form) {
        refuse("block " + std::to_string(block) + " holds rows of another form than the new ones");
    }
    return page;
}

void check_section(const Seal& seal, Form to, Form from) {
    if (to == Form::absent || (is_full(to) && to != from)) {
        refuse("block " + std::to_string(seal.block) + " cannot be sealed: its page is absent or of another form");
    }
}

void check_seal(const NewRows& rows, const Seal& seal) {
    const Batch& batch = *rows.batch;
    if (seal.block < 0 || seal.block >= batch.num_blocks) refuse("seal of unknown block " + std::to_string(seal.block));
    const Page page = batch.page(seal.block, rows.column);
    if (page.address == nullptr) refuse("block " + std::to_string(seal.block) + " has no page to be sealed in");
    Form k_form = rows.form, v_form = rows.form;
    if (seal.row < 0) {
        const Page open = batch.open_page(seal.block, rows.column);
        if (open.address == nullptr && page.both_full()) return;
        if (open.address == nullptr) refuse("block " + std::to_string(seal.block) + " has no rows to be sealed from");
        if (!open.both_full()) refuse("the open page of block " + std::to_string(seal.block) + " is not full");
        k_form = open.k_form;
        v_form = open.v_form;
    } else if (seal.row + int64_t{batch.heads.block_tokens} > batch.num_tokens) {
        refuse("seal of block " + std::to_string(seal.block) + " reads behind the new rows");
    }
    check_section(seal, page.k_form, k_form);
    check_section(seal, page.v_form, v_form);
}

}  // namespace

void store_new_row(const NewRows& rows, int64_t token) {
    const Batch& batch = *rows.batch;
    const Heads& heads = batch.heads;
    const int64_t block = batch.slots[token] / heads.block_tokens, at = batch.slots[token] % heads.block_tokens;
    const Page page = writable_page(rows, block);
    if (page.address == nullptr) return;
    const int bytes = element_bytes(rows.form);
    for (int head = 0; head < heads.num_kv_heads; ++head) {
        std::memcpy(k_section(page, heads, head).rows + at * heads.k_size * bytes, rows.k.at(token, head, rows.form),
                    static_cast<size_t>(heads.k_size * bytes));
        std::memcpy(v_section(page, heads, head).rows + at * heads.v_size * bytes, rows.v.at(token, head, rows.form),
                    static_cast<size_t>(heads.v_size * bytes));
    }
}

void check_slots(const NewRows& rows) {
    const Batch& batch = *rows.batch;
    for (int64_t t = 0; t < batch.num_tokens; ++t) {
        const int64_t slot = batch.slots[t];
        if (slot < 0 || slot >= batch.num_blocks * batch.heads.block_tokens) {
            refuse("slot " + std::to_string(slot) + " lies in no block");
        }
        writable_page(rows, slot / batch.heads.block_tokens);
    }
}

void store_kv(const NewRows& rows) {
    const Batch& batch = *rows.batch;
    check_slots(rows);
    const int64_t row_bytes = int64_t{batch.heads.num_kv_heads} * (batch.heads.k_size + batch.heads.v_size) *
                              element_bytes(rows.form);
    const int64_t nanoseconds = batch.num_tokens * (40 + row_bytes / 8);
    for_each(batch.num_tokens, thread_count(rows.num_threads, nanoseconds), 16,
             [&](int64_t token, int) { store_new_row(rows, token); });
}

void seal_blocks(const Kernels& kernels, const NewRows& rows) {
    const Batch& batch = *rows.batch;
    const Heads& heads = batch.heads;
    for (int64_t i = 0; i < batch.num_seals; ++i) check_seal(rows, batch.seals[i]);
    const int64_t tasks = batch.num_seals * heads.num_kv_heads;
    const int64_t nanoseconds = tasks * heads.block_tokens * (heads.k_size + heads.v_size) / 2;
    for_each(tasks, thread_count(rows.num_threads, nanoseconds), 1, [&](int64_t task, int) {
        kernels.seal(rows, batch.seals[task / heads.num_kv_heads], static_cast<int>(task % heads.num_kv_heads));
    });
}

}  // namespace kt
