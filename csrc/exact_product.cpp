#include "exact_product.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "matmul_cpu.h"

namespace pyggtrain {

// Decoded weights at a time.
static constexpr int64_t CHUNK_VALUES = 1 << 22;

bool exact_product_applies(const ggml_tensor * node) {
    return (node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID) && node->src[0]->type != GGML_TYPE_F32;
}

// Where one row of a product comes from and goes to.
struct product_row {
    const char * x;
    float *      y;
};

// y = x W^T for all `rows`; `weight` is one matrix of `src`, `x_step` the distance in bytes of neighbours in a row of x.
static void multiply_rows(const ggml_tensor * src, const char * weight, const std::vector<product_row> & rows, size_t x_step, int num_threads) {
    const int64_t      columns = src->ne[0], num_outputs = src->ne[1], num_rows = (int64_t) rows.size();
    const auto         to_float = ggml_get_type_traits(src->type)->to_float;
    const int64_t      chunk    = std::clamp<int64_t>(CHUNK_VALUES / columns, 1, num_outputs);
    std::vector<float> decoded((size_t) (chunk * columns)), x((size_t) (num_rows * columns)), y((size_t) (num_rows * chunk));
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t i = 0; i < columns; i++) {
            std::memcpy(&x[(size_t) (row * columns + i)], rows[(size_t) row].x + (size_t) i * x_step, sizeof(float));
        }
    }
    for (int64_t first = 0; first < num_outputs; first += chunk) {
        const int64_t count = std::min(chunk, num_outputs - first);
#pragma omp parallel for num_threads(num_threads) schedule(static)
        for (int64_t i = 0; i < count; i++) {
            to_float(weight + (size_t) (first + i) * src->nb[1], decoded.data() + i * columns, columns);
        }
        product_cpu(GGML_TYPE_F32, decoded.data(), count, columns, x.data(), num_rows, y.data(), num_threads);
        for (int64_t row = 0; row < num_rows; row++) {
            std::memcpy(rows[(size_t) row].y + first, y.data() + row * count, (size_t) count * sizeof(float));
        }
    }
}

template <typename T> static T * at(const ggml_tensor * tensor, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<T *>(static_cast<char *>(tensor->data) + (size_t) i1 * tensor->nb[1] + (size_t) i2 * tensor->nb[2] + (size_t) i3 * tensor->nb[3]);
}

static void dense(ggml_tensor * node, int num_threads) {
    const ggml_tensor * w = node->src[0];
    const ggml_tensor * x = node->src[1];
    for (int64_t i3 = 0; i3 < x->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++) {
            std::vector<product_row> rows;
            for (int64_t i1 = 0; i1 < x->ne[1]; i1++) {
                rows.push_back({ at<const char>(x, i1, i2, i3), at<float>(node, i1, i2, i3) });
            }
            // One matrix serves several of x where their numbers differ.
            multiply_rows(w, at<const char>(w, 0, i2 * w->ne[2] / x->ne[2], i3 * w->ne[3] / x->ne[3]), rows, x->nb[0], num_threads);
        }
    }
}

static void per_expert(ggml_tensor * node, int num_threads) {
    const ggml_tensor *                   w   = node->src[0];
    const ggml_tensor *                   x   = node->src[1];
    const ggml_tensor *                   ids = node->src[2];
    std::vector<std::vector<product_row>> rows((size_t) w->ne[2]);
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t slot = 0; slot < ids->ne[0]; slot++) {
            int32_t expert;
            std::memcpy(&expert, at<const char>(ids, token, 0, 0) + (size_t) slot * ids->nb[0], sizeof(expert));
            PYGGTRAIN_CHECK(expert >= 0 && expert < w->ne[2], "expert", expert, join("0 to ", w->ne[2] - 1));
            rows[(size_t) expert].push_back({ at<const char>(x, slot % x->ne[1], token, 0), at<float>(node, slot, token, 0) });
        }
    }
    for (int64_t expert = 0; expert < w->ne[2]; expert++) {
        if (!rows[(size_t) expert].empty()) {
            multiply_rows(w, at<const char>(w, 0, expert, 0), rows[(size_t) expert], x->nb[0], num_threads);
        }
    }
}

void exact_product(ggml_tensor * node, int num_threads) {
    const ggml_tensor * w       = node->src[0];
    const bool          is_host = w->buffer == nullptr || ggml_backend_buffer_is_host(w->buffer);
    PYGGTRAIN_CHECK(is_host && node->src[1]->type == GGML_TYPE_F32 && node->type == GGML_TYPE_F32, join("product '", node->name, "'"),
                    join("of ", ggml_type_name(w->type), " by ", ggml_type_name(node->src[1]->type)), "a weight in plain host memory, by F32");
    node->op == GGML_OP_MUL_MAT ? dense(node, num_threads) : per_expert(node, num_threads);
}

} // namespace pyggtrain
