// Finds blocks that decode to NaN or infinity, which ggml would carry silently into every product.
//
// Only the float scales of a block can do that, so only they are looked at: no block is decoded, and the search runs at the speed
// of memory for every type (decoding IQ2_XXS, say, is 50 times slower).
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include <pybind11/stl.h>

#include "bindings.h"
#include "check.h"
#include "ggml.h"
#include "quant.h"
#include "tensor_view.h"

namespace pyggtrain {

// Where a block's float16 scales lie, in bytes (ggml/src/ggml-common.h); -1: there is no second one. A scale times the integers
// of a block never leaves float32's range, so a block is finite exactly if its scales are.
struct scale_offsets {
    int64_t first;
    int64_t second = -1;
};

static const std::map<ggml_type, scale_offsets> & half_scales() {
    static const std::map<ggml_type, scale_offsets> offsets = {
        { GGML_TYPE_F16, { 0 } },      { GGML_TYPE_Q1_0, { 0 } },      { GGML_TYPE_Q2_0, { 0 } },      { GGML_TYPE_Q4_0, { 0 } },
        { GGML_TYPE_Q4_1, { 0, 2 } },  { GGML_TYPE_Q5_0, { 0 } },      { GGML_TYPE_Q5_1, { 0, 2 } },   { GGML_TYPE_Q8_0, { 0 } },
        { GGML_TYPE_Q2_K, { 80, 82 } }, { GGML_TYPE_Q3_K, { 108 } },   { GGML_TYPE_Q4_K, { 0, 2 } },   { GGML_TYPE_Q5_K, { 0, 2 } },
        { GGML_TYPE_Q6_K, { 208 } },   { GGML_TYPE_IQ1_S, { 0 } },     { GGML_TYPE_IQ2_XXS, { 0 } },   { GGML_TYPE_IQ2_XS, { 0 } },
        { GGML_TYPE_IQ2_S, { 0 } },    { GGML_TYPE_IQ3_XXS, { 0 } },   { GGML_TYPE_IQ3_S, { 0 } },     { GGML_TYPE_IQ4_NL, { 0 } },
        { GGML_TYPE_IQ4_XS, { 0 } },   { GGML_TYPE_TQ1_0, { 52 } },    { GGML_TYPE_TQ2_0, { 64 } },
    };
    return offsets;
}

template <typename T> static T load(const char * at) {
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
}

static bool is_finite_half(uint16_t bits) {
    return (bits & 0x7C00) != 0x7C00;
}

// The scale of IQ1_M is spread over the high bits of its four scale words.
static bool is_finite_iq1_m(const char * block) {
    const char * words = block + 48;
    return is_finite_half((uint16_t) ((load<uint16_t>(words) >> 12) | ((load<uint16_t>(words + 2) >> 8) & 0x00F0) |
                                      ((load<uint16_t>(words + 4) >> 4) & 0x0F00) | (load<uint16_t>(words + 6) & 0xF000)));
}

// 2^e times a number up to 12 overflows only for the largest three exponents; whether it does depends on the numbers.
static bool is_finite_mxfp4(const char * block, ggml_to_float_t to_float) {
    if ((uint8_t) block[0] < 253) {
        return true;
    }
    float values[32];
    to_float(block, values, 32);
    return std::all_of(values, values + 32, [](float x) { return x - x == 0.0f; });
}

template <typename IsFinite>
static std::pair<int64_t, int64_t> count_bad(const char * blocks, int64_t num_blocks, int64_t block_bytes, int num_threads, IsFinite is_finite) {
    int64_t count = 0, first = num_blocks;
#pragma omp parallel for num_threads(num_threads) schedule(static) reduction(+ : count) reduction(min : first)
    for (int64_t i = 0; i < num_blocks; i++) {
        if (!is_finite(blocks + i * block_bytes)) {
            count++;
            first = std::min(first, i);
        }
    }
    return { count, count > 0 ? first : -1 };
}

static std::pair<int64_t, int64_t> count_nonfinite(const std::string & type_name, const py::handle & blocks, int num_threads) {
    const ggml_type       type        = quant_type(type_name);
    const auto            block_bytes = (int64_t) ggml_type_size(type);
    const borrowed_tensor source      = matrix_borrow(blocks, "blocks", dtype::u8, -1, -1);
    PYGGTRAIN_CHECK(source.dim(1) % block_bytes == 0, "blocks", join("of shape ", shape_text(source.shape)),
                    join("rows of a multiple of ", block_bytes, " bytes, the size of a block of ", type_name));
    PYGGTRAIN_CHECK(num_threads >= 1 && num_threads <= 512, "num_threads", num_threads, "1 to 512");

    py::gil_scoped_release release;
    const auto *  data       = static_cast<const char *>(source.data);
    const int64_t num_blocks = source.dim(0) * source.dim(1) / block_bytes;
    const auto    count      = [&](auto is_finite) { return count_bad(data, num_blocks, block_bytes, num_threads, is_finite); };
    const auto    half       = half_scales().find(type);
    if (half != half_scales().end()) {
        const scale_offsets at = half->second;
        if (at.second < 0) {
            return count([at](const char * block) { return is_finite_half(load<uint16_t>(block + at.first)); });
        }
        return count([at](const char * block) {
            return is_finite_half(load<uint16_t>(block + at.first)) && is_finite_half(load<uint16_t>(block + at.second));
        });
    }
    switch (type) {
        case GGML_TYPE_F32:   return count([](const char * block) { return (load<uint32_t>(block) & 0x7F800000) != 0x7F800000; });
        case GGML_TYPE_BF16:  return count([](const char * block) { return (load<uint16_t>(block) & 0x7F80) != 0x7F80; });
        case GGML_TYPE_IQ1_M: return count(is_finite_iq1_m);
        case GGML_TYPE_MXFP4: {
            const auto to_float = ggml_get_type_traits(type)->to_float;
            return count([to_float](const char * block) { return is_finite_mxfp4(block, to_float); });
        }
        // Its 8-bit scales have no infinity, and ggml reads their NaN as 0.
        case GGML_TYPE_NVFP4: return { 0, -1 };
        default:              throw bridge_error(join("type is ", type_name, "; needed: a type whose scales are known here."));
    }
}

void register_finite(py::module_ & module) {
    module.def("count_nonfinite", &count_nonfinite, py::arg("type"), py::arg("blocks"), py::arg("num_threads"),
               "(how many, first or -1) of the blocks in blocks [rows, row_bytes] that decode to a NaN or an infinity. The GIL is released.");
}

} // namespace pyggtrain
