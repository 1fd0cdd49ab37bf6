// Products with quantised weights on a GPU through llama.cpp's MMQ: x is rounded to 8 bits on the card and multiplied with the packed
// blocks by integer matrix units, which is what llama.cpp itself computes there at inference.
//
// Memory: nothing is allocated. Weights, inputs, outputs and the workspace are the caller's (torch's); all are device memory and, like the
// stream, must stay valid until the work that was queued on the stream has run. No call waits for the card, so all of them may be
// captured in a CUDA graph. Layouts: blocks [N, row_bytes] without gaps, x float32 [T, K] and y float32 [T, N] with rows any distance
// apart. Any thread may call; the current device is restored.
//
// Everything that ggml would abort on is checked first and is a bridge_error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ggml.h"

namespace pyggtrain {

// The architectures that the kernels were compiled for as CMake spells them ("90-real"), or "" where the bridge was built without CUDA.
std::string mmq_architectures();

// Types that MMQ has kernels for.
std::vector<ggml_type> mmq_types();

// Where the work goes. `stream` is a cudaStream_t; 0 is the legacy default stream, as in torch.
struct mmq_place {
    int       device;
    uintptr_t stream;
    uintptr_t workspace;
    size_t    workspace_bytes;
};

// y [T, N] = x [T, K] W^T. Strides in elements.
struct mmq_product {
    ggml_type type;
    uintptr_t blocks;
    int64_t   num_rows;     // N
    int64_t   num_columns;  // K
    uintptr_t x;
    int64_t   x_stride;
    int64_t   num_tokens;   // T
    uintptr_t y;
    int64_t   y_stride;
};

// y [T, J, N] = x [T, J or 1, K] W[ids [T, J]]^T: MUL_MAT_ID. y has no gaps.
struct mmq_expert_product {
    ggml_type type;
    uintptr_t blocks;
    int64_t   num_experts;  // E
    int64_t   num_rows;     // N
    int64_t   num_columns;  // K
    uintptr_t x;
    int64_t   num_inputs;   // J, or 1 where all experts of a token read one row
    int64_t   num_tokens;   // T
    uintptr_t ids;          // int32 [T, J], every entry in 0..E-1; an expert at most once per token
    int64_t   num_used;     // J
    uintptr_t y;
};

// Bytes of workspace that the product needs on that device; `x`, `y`, `blocks` and `ids` are not looked at.
size_t mmq_workspace_bytes(const mmq_product & product, int device);
size_t mmq_workspace_bytes(const mmq_expert_product & product, int device);

void mmq_mul_mat(const mmq_product & product, const mmq_place & place);
void mmq_mul_mat(const mmq_expert_product & product, const mmq_place & place);

} // namespace pyggtrain
