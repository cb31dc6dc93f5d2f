// The rows of a step through the decoder's arithmetic; threads where the work is worth it.
#include "decoder_calls.h"
#include "parallel.h"

namespace kt {
namespace {

constexpr int64_t kRowsAtOnce = 8;

int64_t nanoseconds(int64_t values, Form form) { return form == Form::fp32 ? values / 4 : values / 2; }

}  // namespace

void norm_rows(const Kernels& kernels, const NormCall& call) {
    const int threads = thread_count(call.num_threads, nanoseconds(call.rows * call.size, call.form));
    for_each(call.rows, threads, kRowsAtOnce, [&](int64_t row, int) { kernels.norm(call, row); });
}

void rotate_and_store(const Kernels& kernels, const RotateCall& call) {
    const NewRows& fresh = call.fresh;
    const Heads& heads = fresh.batch->heads;
    check_slots(fresh);
    const int64_t values = int64_t{call.num_heads + 2 * heads.num_kv_heads} * heads.k_size;
    const int threads = thread_count(fresh.num_threads, nanoseconds(fresh.batch->num_tokens * values, fresh.form));
    for_each(fresh.batch->num_tokens, threads, kRowsAtOnce, [&](int64_t token, int) {
        kernels.rotate(call, token);
        store_new_row(fresh, token);
    });
}

void gate_rows(const Kernels& kernels, const GateCall& call) {
    const int threads = thread_count(call.num_threads, 2 * nanoseconds(call.rows * call.size, call.form));
    for_each(call.rows, threads, kRowsAtOnce, [&](int64_t row, int) { kernels.gate(call, row); });
}

}  // namespace kt
