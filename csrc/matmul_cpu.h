// Products with ggml's CPU kernels on plain memory.
#pragma once

#include <cstdint>

#include "ggml.h"

namespace pyggtrain {

// y [rows, num_outputs] = x [rows, columns] W^T, W given as `num_outputs` rows of blocks one after another. All but W is contiguous
// float32. `columns` is a positive multiple of the type's block size. bridge_error if ggml cannot compute it.
void product_cpu(ggml_type type, const void * weight, int64_t num_outputs, int64_t columns, const float * x, int64_t rows, float * y, int num_threads);

} // namespace pyggtrain
