#include "quant.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include <pybind11/stl.h>

#include "bindings.h"
#include "check.h"
#include "decode.h"
#include "ggml-cpu.h"
#include "tensor_view.h"

namespace pyggtrain {

// Types that hold weights in a file. Left out: integers (indices), F64 and the activation types Q8_1 and Q8_K.
static bool is_weight_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_I8: case GGML_TYPE_I16: case GGML_TYPE_I32: case GGML_TYPE_I64: case GGML_TYPE_F64:
        case GGML_TYPE_Q8_1: case GGML_TYPE_Q8_K:
            return false;
        default:
            break;
    }
    return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
}

std::string quant_type_name(ggml_type type) {
    std::string name = ggml_type_name(type);
    for (char & c : name) {
        c = (char) toupper(c);
    }
    return name;
}

static const std::map<std::string, ggml_type> & weight_types() {
    static const std::map<std::string, ggml_type> types = [] {
        std::map<std::string, ggml_type> found;
        for (int i = 0; i < GGML_TYPE_COUNT; i++) {
            if (ggml_blck_size((ggml_type) i) > 0 && is_weight_type((ggml_type) i)) {
                found[quant_type_name((ggml_type) i)] = (ggml_type) i;
            }
        }
        return found;
    }();
    return types;
}

ggml_type quant_type(const std::string & name) {
    const auto found = weight_types().find(name);
    if (found == weight_types().end()) {
        std::string known;
        for (const auto & [known_name, type] : weight_types()) {
            known += (known.empty() ? "" : ", ") + known_name;
        }
        throw bridge_error(join("type is '", name, "'; needed: one of ", known, "."));
    }
    return found->second;
}

static void check_num_threads(int num_threads) {
    PYGGTRAIN_CHECK(num_threads >= 1 && num_threads <= 512, "num_threads", num_threads, "1 to 512");
}

static void dequantize(const std::string & type_name, const py::handle & blocks, const py::handle & out, int num_threads) {
    const ggml_type       type   = quant_type(type_name);
    const borrowed_tensor target = matrix_borrow(out, "out", dtype::f32, -1, -1);
    const int64_t         rows = target.dim(0), columns = target.dim(1);
    PYGGTRAIN_CHECK(columns % ggml_blck_size(type) == 0, "out", join("of shape ", shape_text(target.shape)),
                    join("columns that are a multiple of ", ggml_blck_size(type), ", the block size of ", type_name));
    const size_t          row_bytes = ggml_row_size(type, columns);
    const borrowed_tensor source    = matrix_borrow(blocks, "blocks", dtype::u8, rows, (int64_t) row_bytes);
    check_num_threads(num_threads);

    py::gil_scoped_release release;
    const row_decoder      decode = decoder_of(type);
    const auto *           in       = static_cast<const char *>(source.data);
    auto *                 values   = static_cast<float *>(target.data);
    if (rows == 0 || columns == 0) {
        return;
    }
    if (type == GGML_TYPE_F32) {
        std::memcpy(values, in, (size_t) rows * row_bytes);
        return;
    }
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        decode(in + row * row_bytes, values + row * columns, columns);
    }
}

// ggml's quantisers abort or write nonsense on values that are not finite, so these are refused here.
static void check_finite(const float * values, int64_t n, const char * argument) {
    for (int64_t i = 0; i < n; i++) {
        PYGGTRAIN_CHECK(std::isfinite(values[i]), argument, join("not finite at element ", i, " (", values[i], ")"), "finite values");
    }
}

static void quantize(const std::string & type_name, const py::handle & values, const py::handle & out, int num_threads, const py::object & imatrix) {
    const ggml_type       type   = quant_type(type_name);
    const borrowed_tensor source = matrix_borrow(values, "values", dtype::f32, -1, -1);
    const int64_t         rows = source.dim(0), columns = source.dim(1);
    PYGGTRAIN_CHECK(columns % ggml_blck_size(type) == 0, "values", join("of shape ", shape_text(source.shape)),
                    join("columns that are a multiple of ", ggml_blck_size(type), ", the block size of ", type_name));
    const size_t          row_bytes = ggml_row_size(type, columns);
    const borrowed_tensor target    = matrix_borrow(out, "out", dtype::u8, rows, (int64_t) row_bytes);
    check_num_threads(num_threads);
    const auto *    in      = static_cast<const float *>(source.data);
    const float *   weights = nullptr;
    borrowed_tensor importance;
    if (!imatrix.is_none()) {
        importance = tensor_borrow(imatrix, "imatrix", dtype::f32);
        PYGGTRAIN_CHECK(importance.shape.size() == 1 && importance.dim(0) == columns, "imatrix", join("of shape ", shape_text(importance.shape)),
                        join("shape [", columns, "]"));
        weights = static_cast<const float *>(importance.data);
        check_finite(weights, columns, "imatrix");
        for (int64_t i = 0; i < columns; i++) {
            PYGGTRAIN_CHECK(weights[i] > 0.0f, "imatrix", join(weights[i], " at element ", i), "positive values");
        }
    }
    PYGGTRAIN_CHECK(weights != nullptr || !ggml_quantize_requires_imatrix(type), "imatrix", "missing", join("one weight per column: ", type_name, " needs it"));

    py::gil_scoped_release release;
    if (rows == 0 || columns == 0) {
        return;
    }
    check_finite(in, rows * columns, "values");
    ggml_quantize_init(type);
    auto * blocks = static_cast<char *>(target.data);
    if (type == GGML_TYPE_F32) {
        std::memcpy(blocks, in, (size_t) rows * row_bytes);
        return;
    }
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        ggml_quantize_chunk(type, in + row * columns, blocks + row * row_bytes, 0, 1, columns, weights);
    }
}

struct quant_type_info {
    ggml_type type;
};

void register_quant(py::module_ & module) {
    py::class_<quant_type_info>(module, "QuantType", "One ggml tensor type: how many weights a block holds and how many bytes it takes.")
        .def_property_readonly("name", [](const quant_type_info & self) { return quant_type_name(self.type); })
        .def_property_readonly("id", [](const quant_type_info & self) { return (int) self.type; })
        .def_property_readonly("block_size", [](const quant_type_info & self) { return ggml_blck_size(self.type); })
        .def_property_readonly("block_bytes", [](const quant_type_info & self) { return ggml_type_size(self.type); })
        .def_property_readonly("is_quantized", [](const quant_type_info & self) { return ggml_is_quantized(self.type); })
        .def_property_readonly("needs_imatrix", [](const quant_type_info & self) { return ggml_quantize_requires_imatrix(self.type); });
    module.def("quant_types", [] {
        std::map<std::string, quant_type_info> types;
        for (const auto & [name, type] : weight_types()) {
            types[name] = { type };
        }
        return types;
    }, "Every tensor type that can hold weights, by name.");
    module.def("dequantize", &dequantize, py::arg("type"), py::arg("blocks"), py::arg("out"), py::arg("num_threads"),
               "Decode blocks [rows, row_bytes] uint8 into out [rows, columns] float32, rows shared among threads. The GIL is released.");
    module.def("quantize", &quantize, py::arg("type"), py::arg("values"), py::arg("out"), py::arg("num_threads"), py::arg("imatrix") = py::none(),
               "Encode values [rows, columns] float32 into out [rows, row_bytes] uint8 with ggml's own quantiser; imatrix [columns] float32 weighs columns.");
}

} // namespace pyggtrain
