// Quantised matrix products on the CPU through ggml, on memory that torch owns.
#pragma once

#include <pybind11/pybind11.h>

namespace pyggtrain {

void register_matmul_cpu(pybind11::module_ & module);

} // namespace pyggtrain
