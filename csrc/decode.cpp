// The types of 32 weights with one scale, decoded faster than ggml does.
//
// ggml's loops over them are not vectorised well (docs/gguf.md has both speeds). Arithmetic and its order are ggml's
// (dequantize_row_q4_0 and so on in ggml-quants.c), and this file is compiled without contraction into fused multiply-adds, so every
// bit is the same.

#include "decode.h"

#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace pyggtrain {

namespace {

float half_at(const uint8_t * bytes) {
    ggml_fp16_t half;
    std::memcpy(&half, bytes, sizeof(half));
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    return ggml_fp16_to_fp32(half);
#endif
}

// A block: scale d, minimum m where the type has one, a fifth bit for each weight where it has them, then 16 bytes of 4-bit numbers,
// first halves in the low bits.
template <bool has_minimum, bool has_fifth_bit>
void decode_row(const void * blocks, float * values, int64_t columns) {
    constexpr int block_bytes = 2 + (has_minimum ? 2 : 0) + (has_fifth_bit ? 4 : 0) + 16;
    constexpr int offset      = has_minimum ? 0 : has_fifth_bit ? 16 : 8;
    const auto *  bytes       = static_cast<const uint8_t *>(blocks);
    for (int64_t block = 0; block < columns / 32; block++, bytes += block_bytes, values += 32) {
        const float     d      = half_at(bytes);
        const float     m      = has_minimum ? half_at(bytes + 2) : 0.0f;
        const uint8_t * packed = bytes + block_bytes - 16;
        uint32_t        fifth  = 0;
        if (has_fifth_bit) {
            std::memcpy(&fifth, packed - 4, sizeof(fifth));
        }
        // By way of an array, since the bytes could lie among the values for all that the compiler knows.
        int32_t numbers[32];
        for (int i = 0; i < 16; i++) {
            numbers[i]      = packed[i] & 0x0F;
            numbers[i + 16] = packed[i] >> 4;
        }
        if (has_fifth_bit) {
            for (int i = 0; i < 32; i++) {
                numbers[i] |= (int32_t) (fifth >> i & 1) << 4;
            }
        }
        for (int i = 0; i < 32; i++) {
            const float scaled = (float) (numbers[i] - offset) * d;
            values[i]          = has_minimum ? scaled + m : scaled;
        }
    }
}

} // namespace

row_decoder decoder_of(ggml_type type) {
#if defined(__AVX512F__)
    // Without vectors of 512 bits ggml's loops are as fast.
    switch (type) {
        case GGML_TYPE_Q4_0: return decode_row<false, false>;
        case GGML_TYPE_Q4_1: return decode_row<true, false>;
        case GGML_TYPE_Q5_0: return decode_row<false, true>;
        case GGML_TYPE_Q5_1: return decode_row<true, true>;
        default:             break;
    }
#endif
    return ggml_get_type_traits(type)->to_float;
}

} // namespace pyggtrain
