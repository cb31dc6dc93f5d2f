// The Python module `ktransformer2._native`: addresses and sizes in, nothing out. `kernels/cpu.py` checks them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bandwidth.h"
#include "decoder_calls.h"
#include "dispatch.h"
#include "packed.h"

namespace nb = nanobind;

namespace kt {
namespace {

// (address, token stride, head stride), strides in elements.
using RowsTuple = std::tuple<intptr_t, int64_t, int64_t>;

Rows rows_of(const RowsTuple& rows) {
    return {reinterpret_cast<uint8_t*>(std::get<0>(rows)), std::get<1>(rows), std::get<2>(rows)};
}

template <class T>
const T* pointer(intptr_t address) {
    return reinterpret_cast<const T*>(address);
}

Batch make_batch(const std::vector<intptr_t>& addresses, const std::vector<int64_t>& counts,
                 const std::vector<int>& heads) {
    if (addresses.size() != 8 || counts.size() != 6 || heads.size() != 4) {
        throw std::invalid_argument("a batch takes 8 addresses, 6 counts and 4 head sizes");
    }
    Batch batch{};
    batch.page_table = pointer<int64_t>(addresses[0]);
    batch.open_table = pointer<int64_t>(addresses[1]);
    batch.slots = pointer<int64_t>(addresses[2]);
    batch.query_starts = pointer<int32_t>(addresses[3]);
    batch.context_lens = pointer<int32_t>(addresses[4]);
    batch.entry_starts = pointer<int32_t>(addresses[5]);
    batch.entries = pointer<Entry>(addresses[6]);
    batch.seals = pointer<Seal>(addresses[7]);
    batch.num_blocks = counts[0];
    batch.num_columns = counts[1];
    batch.num_tokens = counts[2];
    batch.num_sequences = counts[3];
    batch.num_entries = counts[4];
    batch.num_seals = counts[5];
    batch.heads = {heads[0], heads[1], heads[2], heads[3]};
    return batch;
}

NewRows new_rows(const Batch& batch, int column, const RowsTuple& k, const RowsTuple& v, int form, int num_threads) {
    return {&batch, column, rows_of(k), rows_of(v), static_cast<Form>(form), num_threads};
}

// Angles of the distinct non-zero shifts of a batch. Empty where nothing was shifted or the layers are not rotated.
struct Turns {
    std::vector<int32_t> shifts;
    std::vector<float> cosines, sines;
    int half = 0;
    bool interleaved = false;

    Turns(const Batch& batch, nb::handle rope) {
        for (int64_t e = 0; e < batch.num_entries; ++e) {
            const int32_t shift = batch.entries[e].shift;
            if (shift != 0 && (shifts.empty() || shifts.back() != shift)) shifts.push_back(shift);
        }
        if (shifts.empty() || rope.is_none()) return;
        std::sort(shifts.begin(), shifts.end());
        shifts.erase(std::unique(shifts.begin(), shifts.end()), shifts.end());
        const auto frequencies = nb::cast<std::vector<double>>(rope.attr("inv_freq"));
        interleaved = nb::cast<bool>(rope.attr("interleaved"));
        half = static_cast<int>(frequencies.size());
        if (2 * half > batch.heads.k_size) throw std::invalid_argument("rope turns more channels than a key has");
        for (const int32_t shift : shifts) {
            for (const double frequency : frequencies) {
                cosines.push_back(static_cast<float>(std::cos(shift * frequency)));
                sines.push_back(static_cast<float>(std::sin(shift * frequency)));
            }
        }
    }

    Rope view() const {
        return {cosines.data(), sines.data(), shifts.data(), static_cast<int>(shifts.size()), half, interleaved};
    }
};

void attend_call(const std::string& isa, const Batch& batch, int column, const std::tuple<RowsTuple, RowsTuple>& kv,
                 const std::tuple<RowsTuple, RowsTuple>& q_out, const std::tuple<int, int, int, bool>& form_heads_threads_prefetch,
                 const std::tuple<float, int, float, intptr_t>& params, nb::handle rope) {
    const auto [form, num_heads, num_threads, prefetch] = form_heads_threads_prefetch;
    const Turns turns(batch, rope);
    AttentionCall call{};
    call.fresh = new_rows(batch, column, std::get<0>(kv), std::get<1>(kv), form, num_threads);
    call.q = rows_of(std::get<0>(q_out));
    call.out = rows_of(std::get<1>(q_out));
    call.num_heads = num_heads;
    call.scale = std::get<0>(params);
    call.window = std::get<1>(params);
    call.softcap = std::get<2>(params);
    call.sinks = pointer<float>(std::get<3>(params));
    call.rope = turns.view();
    call.prefetch = prefetch;
    const Kernels& kernels = kernels_named(isa);
    nb::gil_scoped_release release;
    paged_attention(kernels, call);
}

// (address, row stride in elements, form).
using MatrixTuple = std::tuple<intptr_t, int64_t, int>;

MatrixRows matrix_rows(const MatrixTuple& rows) {
    return {reinterpret_cast<uint8_t*>(std::get<0>(rows)), std::get<1>(rows), static_cast<Form>(std::get<2>(rows))};
}

}  // namespace
}  // namespace kt

NB_MODULE(_native, m) {
    using namespace kt;
    using nb::arg;
    m.doc() =
        "The C++ kernels, called by kernels/cpu.py. Rows are (address, token stride, head stride), strides in elements.";

    nb::class_<Batch>(m, "Batch", "The addresses of one kernels.batch.KVBatch; its tensors must outlive it.")
        .def("__init__", [](Batch* self, const std::vector<intptr_t>& addresses, const std::vector<int64_t>& counts,
                            const std::vector<int>& heads) { new (self) Batch(make_batch(addresses, counts, heads)); },
             arg("addresses"), arg("counts"), arg("heads"),
             "Addresses in the order of kernels.batch.BATCH_DTYPES; counts of blocks, columns, tokens, sequences,\n"
             "entries, seals; heads: KV heads, size of K, size of V, tokens of a block. Raises ValueError.");
    m.def("isa_names", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : runnable_kernels()) names.emplace_back(kernels->name);
        return names;
    }, "The instruction sets that this processor runs, fastest first.");
    m.def("store_kv", [](const Batch& batch, int column, const RowsTuple& k, const RowsTuple& v, int form,
                         int num_threads) {
        const NewRows rows = new_rows(batch, column, k, v, form, num_threads);
        nb::gil_scoped_release release;
        store_kv(rows);
    }, arg("batch"), arg("column"), arg("k"), arg("v"), arg("form"), arg("num_threads"),
          "See kernels.attention.store_kv.");
    m.def("seal", [](const std::string& isa, const Batch& batch, int column, const RowsTuple& k, const RowsTuple& v,
                     int form, int num_threads) {
        const NewRows rows = new_rows(batch, column, k, v, form, num_threads);
        const Kernels& kernels = kernels_named(isa);
        nb::gil_scoped_release release;
        seal_blocks(kernels, rows);
    }, arg("isa"), arg("batch"), arg("column"), arg("k"), arg("v"), arg("form"), arg("num_threads"),
          "See kernels.attention.seal.");
    m.def("paged_attention", &attend_call, arg("isa"), arg("batch"), arg("column"), arg("kv"), arg("q_out"),
          arg("form_heads_threads_prefetch"), arg("params"), arg("rope").none(),
          "See kernels.attention.paged_attention. `params`: scale, window, softcap, address of the sinks, where 0 means\n"
          "none of the last three; `rope`: a layout.RopeSpec.");
    m.def("norm_rows", [](const std::string& isa, const std::tuple<intptr_t, intptr_t, intptr_t, intptr_t>& addresses,
                          int64_t rows, int size, int form, float eps, int num_threads) {
        const auto [x, residual, weight, out] = addresses;
        const NormCall call{pointer<uint8_t>(x), reinterpret_cast<uint8_t*>(residual), pointer<uint8_t>(weight),
                            reinterpret_cast<uint8_t*>(out), rows, size, static_cast<Form>(form), eps, num_threads};
        const Kernels& kernels = kernels_named(isa);
        nb::gil_scoped_release release;
        norm_rows(kernels, call);
    }, arg("isa"), arg("addresses"), arg("rows"), arg("size"), arg("form"), arg("eps"), arg("num_threads"),
          "See kernels.decoder.rms_norm. `addresses`: x, residual (0: none), weight, out.");
    m.def("rotate_and_store", [](const std::string& isa, const Batch& batch, int column,
                                 const std::tuple<RowsTuple, RowsTuple, RowsTuple>& qkv,
                                 const std::tuple<int, int, int>& form_heads_threads,
                                 const std::tuple<intptr_t, intptr_t, int>& angles,
                                 const std::tuple<intptr_t, intptr_t, float>& norms) {
        const auto [form, num_heads, num_threads] = form_heads_threads;
        const auto [cosines, sines, half] = angles;
        const auto [q_weight, k_weight, eps] = norms;
        const RotateCall call{new_rows(batch, column, std::get<1>(qkv), std::get<2>(qkv), form, num_threads),
                              rows_of(std::get<0>(qkv)), num_heads, pointer<float>(cosines), pointer<float>(sines), half,
                              pointer<uint8_t>(q_weight), pointer<uint8_t>(k_weight), eps};
        const Kernels& kernels = kernels_named(isa);
        nb::gil_scoped_release release;
        rotate_and_store(kernels, call);
    }, arg("isa"), arg("batch"), arg("column"), arg("qkv"), arg("form_heads_threads"), arg("angles"), arg("norms"),
          "See kernels.decoder.rotate_and_store. `angles`: cosines, sines, how many a row has; `norms`: weights of\n"
          "queries and keys (0: none), eps.");
    m.def("gate_rows", [](const std::string& isa, intptr_t gate_up, intptr_t out, int64_t rows, int size, int form,
                          int num_threads) {
        const GateCall call{pointer<uint8_t>(gate_up), reinterpret_cast<uint8_t*>(out), rows, size,
                            static_cast<Form>(form), num_threads};
        const Kernels& kernels = kernels_named(isa);
        nb::gil_scoped_release release;
        gate_rows(kernels, call);
    }, arg("isa"), arg("gate_up"), arg("out"), arg("rows"), arg("size"), arg("form"), arg("num_threads"),
          "See kernels.decoder.silu_multiply.");
    nb::class_<PackedMatrix>(m, "PackedMatrix", "The addresses of one kernels.linear.PackedMatrix; its tensors must outlive it.")
        .def("__init__", [](PackedMatrix* self, intptr_t tiles, intptr_t bias, int64_t num_outputs, int64_t num_inputs,
                            bool int4) {
            new (self) PackedMatrix{pointer<uint8_t>(tiles), pointer<float>(bias), num_outputs, num_inputs, int4};
        }, arg("tiles"), arg("bias"), arg("num_outputs"), arg("num_inputs"), arg("int4"),
             "`bias`: the address of fp32 numbers, 0 where there are none.");
    m.def("multiply_packed", [](const std::string& isa, const PackedMatrix& matrix, const MatrixTuple& x,
                                const MatrixTuple& out, int64_t num_rows, int num_threads) {
        const PackedKernels& kernels = packed_kernels_named(isa.c_str());
        const Product product{&matrix, matrix_rows(x), matrix_rows(out), num_rows, num_threads};
        nb::gil_scoped_release release;
        multiply_packed(kernels, product);
    }, arg("isa"), arg("matrix"), arg("x"), arg("out"), arg("num_rows"), arg("num_threads"),
          "See kernels.linear.multiply. `x`, `out`: (address, row stride in elements, form).");
    m.def("multiply_dense", [](const std::string& isa, const MatrixTuple& weights, intptr_t bias, const MatrixTuple& x,
                               const MatrixTuple& out, const std::tuple<int64_t, int64_t, int64_t>& sizes,
                               int num_threads) {
        const PackedKernels& kernels = packed_kernels_named(isa.c_str());
        const auto [num_rows, num_inputs, num_outputs] = sizes;
        const DenseProduct product{matrix_rows(weights), pointer<float>(bias), matrix_rows(x), matrix_rows(out),
                                   num_rows, num_inputs, num_outputs, num_threads};
        nb::gil_scoped_release release;
        multiply_dense(kernels, product);
    }, arg("isa"), arg("weights"), arg("bias"), arg("x"), arg("out"), arg("sizes"), arg("num_threads"),
          "See kernels.linear.multiply_dense. `bias`: an address or 0; `sizes`: rows, inputs, outputs.");
    m.def("read_bandwidth", [](int64_t num_bytes, int num_threads, int rounds) {
        nb::gil_scoped_release release;
        return read_bandwidth(num_bytes, num_threads, rounds);
    }, arg("num_bytes"), arg("num_threads"), arg("rounds"), "Bytes per second, the median of `rounds` passes.");
}
