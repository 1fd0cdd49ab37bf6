#include "tensor_view.h"

#include <algorithm>
#include <cstring>

#include "bindings.h"
#include "check.h"
#include "ggml-backend.h"
#include "ggml.h"

namespace pyggtrain {

// DLPack 1.0 (https://dmlc.github.io/dlpack/latest/c_api.html): the layout is a fixed ABI, so the few structs stand here.
extern "C" {
struct DLDevice {
    int32_t device_type;
    int32_t device_id;
};
struct DLDataType {
    uint8_t  code;
    uint8_t  bits;
    uint16_t lanes;
};
struct DLTensor {
    void *     data;
    DLDevice   device;
    int32_t    ndim;
    DLDataType dtype;
    int64_t *  shape;
    int64_t *  strides;
    uint64_t   byte_offset;
};
struct DLManagedTensor {
    DLTensor dl_tensor;
    void *   manager_ctx;
    void (*deleter)(DLManagedTensor *);
};
struct DLPackVersion {
    uint32_t major;
    uint32_t minor;
};
struct DLManagedTensorVersioned {
    DLPackVersion version;
    void *        manager_ctx;
    void (*deleter)(DLManagedTensorVersioned *);
    uint64_t flags;
    DLTensor dl_tensor;
};
}

static constexpr int32_t DL_CPU = 1;

static DLDataType dl_type(dtype type) {
    switch (type) {
        case dtype::u8:  return { 1, 8, 1 };
        case dtype::i32: return { 0, 32, 1 };
        case dtype::f32: return { 2, 32, 1 };
    }
    throw bridge_error("unknown dtype");
}

static const char * dtype_name(dtype type) {
    switch (type) {
        case dtype::u8:  return "torch.uint8";
        case dtype::i32: return "torch.int32";
        case dtype::f32: return "torch.float32";
    }
    return "?";
}

// What a consumer of a capsule holds: the reference to the memory and the arrays that DLTensor points to.
template <typename Managed> struct export_context {
    Managed               managed;
    std::shared_ptr<void> owner;
    std::vector<int64_t>  shape;
    std::vector<int64_t>  strides;
};

template <typename Managed> static Managed * make_managed(const tensor_view & view) {
    auto * context = new export_context<Managed>{ {}, view.owner, view.shape, std::vector<int64_t>(view.shape.size(), 1) };
    for (size_t i = view.shape.size(); i-- > 1;) {
        context->strides[i - 1] = context->strides[i] * view.shape[i];
    }
    Managed & managed  = context->managed;
    managed.dl_tensor  = { view.data,           { DL_CPU, 0 },          (int32_t) view.shape.size(), dl_type(view.type),
                           context->shape.data(), context->strides.data(), 0 };
    managed.manager_ctx = context;
    managed.deleter     = [](Managed * self) { delete static_cast<export_context<Managed> *>(self->manager_ctx); };
    return &managed;
}

// A capsule that nobody consumed still owns its tensor; a consumer renames the capsule to say that it took over.
template <typename Managed> static void free_unread(PyObject * capsule, const char * name) {
    if (PyCapsule_IsValid(capsule, name)) {
        auto * managed = static_cast<Managed *>(PyCapsule_GetPointer(capsule, name));
        managed->deleter(managed);
    }
}

py::capsule tensor_view::dlpack(bool versioned) const {
    if (versioned) {
        auto * managed   = make_managed<DLManagedTensorVersioned>(*this);
        managed->version = { 1, 0 };
        managed->flags   = 0;
        return py::capsule(managed, "dltensor_versioned",
                           [](PyObject * o) { free_unread<DLManagedTensorVersioned>(o, "dltensor_versioned"); });
    }
    return py::capsule(make_managed<DLManagedTensor>(*this), "dltensor",
                       [](PyObject * o) { free_unread<DLManagedTensor>(o, "dltensor"); });
}

borrowed_tensor tensor_borrow(const py::handle & tensor, const char * argument, dtype type) {
    PYGGTRAIN_CHECK(py::hasattr(tensor, "__dlpack__"), argument, py::str(py::type::of(tensor)).cast<std::string>(), "a torch tensor");
    py::capsule capsule;
    try {
        capsule = tensor.attr("__dlpack__")();
    } catch (py::error_already_set & error) {
        throw bridge_error(join(argument, " cannot be shared with C++: ", error.what()));
    }
    auto * managed = static_cast<DLManagedTensor *>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (managed == nullptr) {
        throw py::error_already_set();
    }
    const DLTensor &     t = managed->dl_tensor;
    std::vector<int64_t> shape(t.shape, t.shape + t.ndim);
    PYGGTRAIN_CHECK(t.device.device_type == DL_CPU, argument, "on another device", "a CPU tensor");
    const DLDataType wanted = dl_type(type);
    PYGGTRAIN_CHECK(t.dtype.code == wanted.code && t.dtype.bits == wanted.bits && t.dtype.lanes == 1, argument,
                    join("of another dtype (DLPack code ", (int) t.dtype.code, ", ", (int) t.dtype.bits, " bits)"), dtype_name(type));
    const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
    int64_t    stride   = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        PYGGTRAIN_CHECK(is_empty || t.strides == nullptr || shape[i] <= 1 || t.strides[i] == stride, argument,
                        join("of shape ", shape_text(shape), " but not contiguous"), "a contiguous tensor (call .contiguous())");
        stride *= shape[i];
    }
    return { capsule, static_cast<char *>(t.data) + t.byte_offset, shape };
}

borrowed_tensor matrix_borrow(const py::handle & tensor, const char * argument, dtype type, int64_t rows, int64_t columns) {
    borrowed_tensor matrix = tensor_borrow(tensor, argument, type);
    const bool      fits   = matrix.shape.size() == 2 && (rows < 0 || matrix.shape[0] == rows) && (columns < 0 || matrix.shape[1] == columns);
    const auto      size   = [](int64_t n) { return n < 0 ? std::string("any") : std::to_string(n); };
    PYGGTRAIN_CHECK(fits, argument, join("of shape ", shape_text(matrix.shape)), join("shape [", size(rows), ", ", size(columns), "]"));
    return matrix;
}

std::vector<int64_t> tensor_shape(const ggml_tensor * tensor) {
    std::vector<int64_t> shape;
    for (int i = ggml_n_dims(tensor); i-- > 0;) {
        shape.push_back(tensor->ne[i]);
    }
    return shape;
}

std::string shape_text(const std::vector<int64_t> & shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); i++) {
        text += (i ? ", " : "") + std::to_string(shape[i]);
    }
    return text + "]";
}

tensor_view tensor_copy(const ggml_tensor * tensor) {
    const bool is_float = tensor->type == GGML_TYPE_F32 || tensor->type == GGML_TYPE_F16 || tensor->type == GGML_TYPE_BF16;
    PYGGTRAIN_CHECK(is_float || tensor->type == GGML_TYPE_I32, join("tensor '", tensor->name, "'"),
                    join("of type ", ggml_type_name(tensor->type)), "F32, F16, BF16 or I32");
    const int64_t      n = ggml_nelements(tensor);
    std::vector<char>  bytes;
    const char *       base = static_cast<const char *>(tensor->data);
    if (tensor->buffer != nullptr && !ggml_backend_buffer_is_host(tensor->buffer)) {
        bytes.resize(ggml_nbytes(tensor));
        ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
        base = bytes.data();
    }
    auto copy = std::shared_ptr<void>(::operator new((size_t) n * 4), [](void * p) { ::operator delete(p); });
    auto * f  = static_cast<float *>(copy.get());
    auto * i  = static_cast<int32_t *>(copy.get());
    int64_t o = 0;
    for (int64_t i3 = 0; i3 < tensor->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < tensor->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < tensor->ne[1]; i1++) {
                for (int64_t i0 = 0; i0 < tensor->ne[0]; i0++, o++) {
                    const char * p = base + i0 * tensor->nb[0] + i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3];
                    switch (tensor->type) {
                        case GGML_TYPE_F16:  f[o] = ggml_fp16_to_fp32(*reinterpret_cast<const ggml_fp16_t *>(p)); break;
                        case GGML_TYPE_BF16: f[o] = ggml_bf16_to_fp32(*reinterpret_cast<const ggml_bf16_t *>(p)); break;
                        case GGML_TYPE_I32:  i[o] = *reinterpret_cast<const int32_t *>(p); break;
                        default:             f[o] = *reinterpret_cast<const float *>(p); break;
                    }
                }
            }
        }
    }
    return { copy, copy.get(), tensor_shape(tensor), is_float ? dtype::f32 : dtype::i32 };
}

void register_tensor_view(py::module_ & module) {
    py::class_<tensor_view>(module, "TensorView",
                            "Memory owned by the bridge, for torch.from_dlpack: no copy; lives as long as any tensor made from it.")
        .def_readonly("shape", &tensor_view::shape)
        .def(
            "__dlpack__",
            [](const tensor_view & self, const py::object &, const py::object & max_version, const py::object & dl_device, const py::object & copy) {
                PYGGTRAIN_CHECK(copy.is_none() || !copy.cast<bool>(), "copy", "True", "None or False: this view is never copied");
                PYGGTRAIN_CHECK(dl_device.is_none() || dl_device.cast<py::tuple>()[0].cast<int>() == DL_CPU, "dl_device", "not the CPU", "(1, 0) or None");
                return self.dlpack(!max_version.is_none() && max_version.cast<py::tuple>()[0].cast<int>() >= 1);
            },
            py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(),
            py::arg("copy") = py::none())
        .def("__dlpack_device__", [](const tensor_view &) { return py::make_tuple(DL_CPU, 0); });
}

} // namespace pyggtrain
