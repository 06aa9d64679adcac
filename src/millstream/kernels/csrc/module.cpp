// The Python module. Arrays come as addresses (ints): reading a tensor through the buffer protocol or DLPack costs
// 2 us each, an int 10 ns. millstream.kernels.native keeps the tensors alive and checks their shapes.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "dequantize.h"
#include "packing.h"
#include "plan.h"
#include "runtime.h"
#include "sampling.h"

namespace nb = nanobind;

namespace millstream {
namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

LinearWeight make_weight(int type, int num_inputs, int num_outputs, bool is_gate_up, Address words, Address bias) {
    return {static_cast<WeightType>(type), num_inputs, num_outputs, is_gate_up, at<std::uint32_t>(words),
            at<float>(bias)};
}

StepTables make_tables(int num_tokens, int num_requests, int block_stride, Address positions, Address slots,
                       Address query_start, Address context_len, Address block_table) {
    return {num_tokens, num_requests, block_stride, at<std::int32_t>(positions), at<std::int32_t>(slots),
            at<std::int32_t>(query_start), at<std::int32_t>(context_len), at<std::int32_t>(block_table)};
}

KVCache make_cache(int dtype, int num_blocks, int block_size, int num_kv_heads, int head_dim, Address data) {
    return {static_cast<DType>(dtype), block_size, num_kv_heads, head_dim, at<void>(data), num_blocks};
}

// The operations, with the same arguments for Runtime (does them) and Plan (records them).
template <class Target>
void add_operations(nb::class_<Target>& c) {
    using NoGil = nb::call_guard<nb::gil_scoped_release>;
    c.def(
         "linear",
         [](Target& self, const LinearWeight& weight, int dtype, int epilogue, int num_rows, Address x, int x_stride,
            Address residual, Address out, int out_stride, Address ids) {
             self.linear({static_cast<DType>(dtype), static_cast<Epilogue>(epilogue), &weight, num_rows, at<void>(x),
                          x_stride, at<void>(residual), at<void>(out), out_stride, at<std::int32_t>(ids), nullptr,
                          nullptr});
         },
         NoGil())
        .def(
            "rms_norm",
            [](Target& self, int dtype, int num_rows, int width, float eps, Address x, Address weight, Address out) {
                self.rms_norm({static_cast<DType>(dtype), num_rows, width, eps, at<void>(x), at<void>(weight),
                               at<void>(out)});
            },
            NoGil())
        .def(
            "gather",
            [](Target& self, int num_rows, std::size_t row_bytes, int num_table_rows, Address ids, Address table,
               Address out) {
                self.gather({num_rows, row_bytes, num_table_rows, at<std::int32_t>(ids), at<void>(table),
                             at<void>(out)});
            },
            NoGil())
        .def(
            "rotary_and_cache",
            [](Target& self, const StepTables& tables, const KVCache& cache, int num_heads, Address qkv,
               Address cos_sin, int num_positions, Address q_norm, Address k_norm, float eps, Address q) {
                self.rotary_and_cache({&tables, &cache, num_heads, at<void>(qkv), at<float>(cos_sin), num_positions,
                                       at<void>(q_norm), at<void>(k_norm), eps, at<void>(q)});
            },
            NoGil())
        .def(
            "attention",
            [](Target& self, const StepTables& tables, const KVCache& cache, int num_heads, float scale, int window,
               Address q, Address out) {
                self.attention({&tables, &cache, nullptr, num_heads, scale, window, at<void>(q), at<void>(out)});
            },
            NoGil());
}

void add_runtime(nb::module_& m) {
    using NoGil = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Runtime> c(m, "Runtime");
    c.def("__init__",
          [](Runtime* self, int level, int num_threads, bool is_pinned) {
              new (self) Runtime(static_cast<Level>(level), num_threads, is_pinned);
          })
        .def("level", [](Runtime& self) { return static_cast<int>(self.level()); })
        .def("num_threads", [](Runtime& self) { return self.pool().size(); })
        .def(
            "pack",
            [](Runtime& self, int type, int dtype, int num_inputs, int num_outputs, Address weight, Address up,
               Address words) {
                pack({static_cast<WeightType>(type), static_cast<DType>(dtype), num_inputs, num_outputs,
                      at<void>(weight), at<void>(up), at<std::uint32_t>(words)},
                     self.pool());
            },
            NoGil())
        .def(
            "read_memory",
            [](Runtime& self, Address data, std::size_t num_bytes) {
                self.pool().run([&](Worker& w) { self.kernels().read_memory(at<void>(data), num_bytes, w); });
            },
            NoGil())
        .def(
            "multiply",
            [](Runtime& self, int dtype, int count) {
                self.pool().run([&](Worker& w) { self.kernels().multiply(static_cast<DType>(dtype), count, w); });
            },
            NoGil())
        .def(
            "row_stats",
            [](Runtime& self, int num_rows, int vocab, Address logits, Address ids, Address best, Address log_sum) {
                row_stats({num_rows, vocab, at<float>(logits), at<std::int32_t>(ids), at<float>(best),
                           at<double>(log_sum)},
                          self);
            },
            NoGil())
        .def(
            "draw",
            [](Runtime& self, int num_rows, int vocab, Address logits, Address temperature, Address top_k,
               Address top_p, Address min_p, Address number, Address ids) {
                draw({num_rows, vocab, at<float>(logits), at<float>(temperature), at<std::int32_t>(top_k),
                      at<double>(top_p), at<float>(min_p), at<double>(number), at<std::int32_t>(ids)},
                     self);
            },
            NoGil());
    add_operations(c);
}

void add_plan(nb::module_& m) {
    using NoGil = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Plan> c(m, "Plan");
    c.def(nb::init<Runtime&, int>(), nb::keep_alive<1, 2>())
        .def("num_ops", &Plan::num_ops)
        .def("op_name", &Plan::op_name)
        .def(
            "run",
            [](Plan& self, int num_rows, const StepTables* tables, Address ids, Address seconds) {
                self.run(num_rows, tables, at<std::int32_t>(ids), at<double>(seconds));
            },
            nb::arg("num_rows"), nb::arg("tables").none(), nb::arg("ids"), nb::arg("seconds"), NoGil());
    add_operations(c);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a program that ends with an engine alive leaks nothing worth a report
    m.def("best_level", [] { return static_cast<int>(best_level()); });
    m.def(
        "dequantize",
        [](int type, int dtype, std::size_t num_blocks, Address data, Address out) {
            return dequantize(type, static_cast<DType>(dtype), num_blocks, at<void>(data), at<void>(out));
        },
        nb::call_guard<nb::gil_scoped_release>());
    nb::class_<LinearWeight>(m, "LinearWeight")
        .def("__init__",
             [](LinearWeight* self, int type, int num_inputs, int num_outputs, bool is_gate_up, Address words,
                Address bias) {
                 new (self) LinearWeight(make_weight(type, num_inputs, num_outputs, is_gate_up, words, bias));
             })
        .def("panel_words", &LinearWeight::panel_words)
        .def("num_panels", &LinearWeight::num_panels);
    nb::class_<StepTables>(m, "StepTables").def("__init__", [](StepTables* self, int num_tokens, int num_requests,
                                                                 int block_stride, Address positions, Address slots,
                                                                 Address query_start, Address context_len,
                                                                 Address block_table) {
        new (self) StepTables(make_tables(num_tokens, num_requests, block_stride, positions, slots, query_start,
                                          context_len, block_table));
    });
    nb::class_<KVCache>(m, "KVCache").def("__init__", [](KVCache* self, int dtype, int num_blocks, int block_size,
                                                           int num_kv_heads, int head_dim, Address data) {
        new (self) KVCache(make_cache(dtype, num_blocks, block_size, num_kv_heads, head_dim, data));
    });
    add_runtime(m);
    add_plan(m);
}

}  // namespace millstream
