// Products of llama.cpp's graph computed again without the rounding of activations, see session.cpp.
#pragma once

struct ggml_tensor;

namespace pyggtrain {

// Whether ggml rounds the second operand of this node: a matrix product (dense or per expert) by anything but float32.
bool exact_product_applies(const ggml_tensor * node);

// Overwrites the result of such a node, which has just been computed on the host, with the product of the decoded first operand
// and the second, both float32. Needs 16 MiB beside copies of the second operand and of the result. bridge_error if the node's
// memory is not plain host memory.
void exact_product(ggml_tensor * node, int num_threads);

} // namespace pyggtrain
