// What Python sees of matmul_cuda.h, in builds with and without CUDA.
#include <pybind11/stl.h>

#include "bindings.h"
#include "check.h"
#include "matmul_cuda.h"
#include "quant.h"

namespace pyggtrain {

#ifndef PYGGTRAIN_CUDA_ARCHITECTURES
std::string mmq_architectures() { return ""; }

std::vector<ggml_type> mmq_types() { return {}; }

[[noreturn]] static void refuse() {
    throw bridge_error("MMQ is not in this build of pyggtrain. Install it with -Ccmake.define.PYGGTRAIN_CUDA=ON.");
}

size_t mmq_workspace_bytes(const mmq_product &, int) { refuse(); }

size_t mmq_workspace_bytes(const mmq_expert_product &, int) { refuse(); }

void mmq_mul_mat(const mmq_product &, const mmq_place &) { refuse(); }

void mmq_mul_mat(const mmq_expert_product &, const mmq_place &) { refuse(); }
#endif

void register_matmul_cuda(py::module_ & module) {
    module.attr("CUDA_ARCHITECTURES") = mmq_architectures();
    module.def("mmq_types", [] {
        std::vector<std::string> names;
        for (const ggml_type type : mmq_types()) {
            names.push_back(quant_type_name(type));
        }
        return names;
    }, "Types that llama.cpp's MMQ multiplies on a GPU; none in a build without CUDA.");
    module.def("mmq_workspace_bytes", [](const std::string & type, int64_t num_rows, int64_t num_columns, int64_t num_tokens, int device) {
        return mmq_workspace_bytes(mmq_product{ quant_type(type), 0, num_rows, num_columns, 0, num_columns, num_tokens, 0, num_rows }, device);
    }, py::arg("type"), py::kw_only(), py::arg("num_rows"), py::arg("num_columns"), py::arg("num_tokens"), py::arg("device"),
               "Bytes of device memory that `mmq` needs beside its operands.");
    module.def("mmq", [](const std::string & type, uintptr_t blocks, int64_t num_rows, int64_t num_columns, uintptr_t x, int64_t x_stride, int64_t num_tokens,
                         uintptr_t y, int64_t y_stride, uintptr_t workspace, size_t workspace_bytes, int device, uintptr_t stream) {
        const mmq_product product{ quant_type(type), blocks, num_rows, num_columns, x, x_stride, num_tokens, y, y_stride };
        py::gil_scoped_release release;
        mmq_mul_mat(product, mmq_place{ device, stream, workspace, workspace_bytes });
    }, py::arg("type"), py::kw_only(), py::arg("blocks"), py::arg("num_rows"), py::arg("num_columns"), py::arg("x"), py::arg("x_stride"), py::arg("num_tokens"),
               py::arg("y"), py::arg("y_stride"), py::arg("workspace"), py::arg("workspace_bytes"), py::arg("device"), py::arg("stream"),
               "Queue y [T, N] = x [T, K] W^T on a stream, x rounded to 8 bits. Addresses of device memory, strides in elements, float32 in and out.");
    module.def("mmq_experts_workspace_bytes", [](const std::string & type, int64_t num_experts, int64_t num_rows, int64_t num_columns, int64_t num_inputs,
                                                 int64_t num_tokens, int64_t num_used, int device) {
        return mmq_workspace_bytes(mmq_expert_product{ quant_type(type), 0, num_experts, num_rows, num_columns, 0, num_inputs, num_tokens, 0, num_used, 0 }, device);
    }, py::arg("type"), py::kw_only(), py::arg("num_experts"), py::arg("num_rows"), py::arg("num_columns"), py::arg("num_inputs"), py::arg("num_tokens"),
               py::arg("num_used"), py::arg("device"), "Bytes of device memory that `mmq_experts` needs beside its operands.");
    module.def("mmq_experts", [](const std::string & type, uintptr_t blocks, int64_t num_experts, int64_t num_rows, int64_t num_columns, uintptr_t x,
                                 int64_t num_inputs, int64_t num_tokens, uintptr_t ids, int64_t num_used, uintptr_t y, uintptr_t workspace,
                                 size_t workspace_bytes, int device, uintptr_t stream) {
        const mmq_expert_product product{ quant_type(type), blocks, num_experts, num_rows, num_columns, x, num_inputs, num_tokens, ids, num_used, y };
        py::gil_scoped_release release;
        mmq_mul_mat(product, mmq_place{ device, stream, workspace, workspace_bytes });
    }, py::arg("type"), py::kw_only(), py::arg("blocks"), py::arg("num_experts"), py::arg("num_rows"), py::arg("num_columns"), py::arg("x"),
               py::arg("num_inputs"), py::arg("num_tokens"), py::arg("ids"), py::arg("num_used"), py::arg("y"), py::arg("workspace"), py::arg("workspace_bytes"),
               py::arg("device"), py::arg("stream"),
               "Queue y [T, J, N] = x [T, J or 1, K] W[ids]^T on a stream, x rounded to 8 bits; ids int32 [T, J]. Addresses of device memory, no gaps.");
}

} // namespace pyggtrain
