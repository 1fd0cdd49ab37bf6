// What each part of the bridge adds to the Python module. The docstrings stand beside the functions they describe.
#pragma once

#include <pybind11/pybind11.h>

namespace pyggtrain {

namespace py = pybind11;

void register_finite(py::module_ & module);
void register_gguf_file(py::module_ & module);
void register_graph(py::module_ & module);
void register_matmul_cpu(py::module_ & module);
void register_matmul_cuda(py::module_ & module);
void register_quant(py::module_ & module);
void register_session(py::module_ & module);
void register_tensor_view(py::module_ & module);
void register_tokenizer(py::module_ & module);

} // namespace pyggtrain
