// Tensors that cross between C++ and torch through DLPack, without a copy and without libtorch.
//
// Order: every shape here is in torch order (slowest dimension first). ggml's `ne` (fastest first) is turned around in this
// file's functions and nowhere else.
//
// Lifetime: a tensor_view owns a reference to whatever holds its memory (a file mapping, a buffer). torch takes over a copy of
// that reference when it imports the view, so the memory lives as long as any tensor, view of a tensor or unread capsule does.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

struct ggml_tensor;

namespace pyggtrain {

namespace py = pybind11;

enum class dtype { u8, i32, f32 };

struct tensor_view {
    std::shared_ptr<void> owner;
    void *                data;
    std::vector<int64_t>  shape;
    dtype                 type;

    // DLPack capsule; `versioned` chooses the "dltensor_versioned" layout (DLPack 1.0) over the older one.
    py::capsule dlpack(bool versioned) const;
};

// Memory of a Python tensor, held for the length of one call. The tensor must be on the CPU, contiguous, of the given type;
// anything else is a bridge_error that names `argument`. No copy is ever made.
struct borrowed_tensor {
    py::capsule          capsule;
    void *               data;
    std::vector<int64_t> shape;

    int64_t dim(size_t i) const { return shape[i]; }
};

borrowed_tensor tensor_borrow(const py::handle & tensor, const char * argument, dtype type);

// As above for a matrix [rows, columns] of which `rows` or `columns` may be given (-1 = any).
borrowed_tensor matrix_borrow(const py::handle & tensor, const char * argument, dtype type, int64_t rows, int64_t columns);

std::vector<int64_t> tensor_shape(const ggml_tensor * tensor);
std::string          shape_text(const std::vector<int64_t> & shape);

// A contiguous copy of a ggml tensor on the host (f32, f16, bf16 become f32; i32 stays), whatever its strides.
tensor_view tensor_copy(const ggml_tensor * tensor);

} // namespace pyggtrain
