// llama.cpp's own tokenizer, from a vocab-only load of the same GGUF file: no weight is read. A tokenizer is immutable, so
// threads may share it.
#pragma once

#include <pybind11/pybind11.h>

namespace pyggtrain {

void register_tokenizer(pybind11::module_ & module);

} // namespace pyggtrain
