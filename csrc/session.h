// llama.cpp running one model on the CPU: what a person who serves the file would get. Used to prove parity.
//
// A session owns its model, context and adapters. Calls on one session must not overlap (the GIL is released while llama.cpp
// computes; a mutex makes overlapping calls wait). Every call starts from an empty memory (KV cache).
#pragma once

#include <pybind11/pybind11.h>

namespace pyggtrain {

void register_session(pybind11::module_ & module);

} // namespace pyggtrain
