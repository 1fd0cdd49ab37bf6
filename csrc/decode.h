#pragma once

#include <cstdint>

#include "ggml.h"

namespace pyggtrain {

using row_decoder = void (*)(const void * blocks, float * values, int64_t columns);

// The function that decodes a row of blocks: our own where it is faster than ggml's, else ggml's. Both give the same bits.
row_decoder decoder_of(ggml_type type);

} // namespace pyggtrain
