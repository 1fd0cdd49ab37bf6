// ggml's tensor types: sizes, and conversion of rows between blocks and float32 on the CPU.
#pragma once

#include <string>

#include "ggml.h"

namespace pyggtrain {

// The storable type with this name or number. A name or number that is none (Q8_K, removed numbers, integers) is an error that
// lists the known ones: bridge_error for a name, nullptr for a number.
ggml_type quant_type(const std::string & name);

inline const ggml_type_traits * quant_traits_or_null(int64_t type_id) {
    const bool is_known = type_id >= 0 && type_id < GGML_TYPE_COUNT && ggml_blck_size((ggml_type) type_id) > 0;
    return is_known ? ggml_get_type_traits((ggml_type) type_id) : nullptr;
}

// The name as ggml spells it in upper case: "Q4_K", "IQ2_XXS", "F32".
std::string quant_type_name(ggml_type type);

} // namespace pyggtrain
