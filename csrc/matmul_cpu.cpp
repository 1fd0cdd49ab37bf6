// Quantised matrix products on the CPU through ggml, on memory that torch owns.
#include "matmul_cpu.h"

#include <vector>

#include "bindings.h"
#include "check.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "quant.h"
#include "tensor_view.h"

namespace pyggtrain {

// Room for the handful of tensor headers and the graph of one product; no tensor data lives here.
static constexpr size_t GRAPH_MEM_BYTES = 16 * 1024;

void product_cpu(ggml_type type, const void * weight, int64_t num_outputs, int64_t columns, const float * x, int64_t rows, float * y, int num_threads) {
    alignas(64) char graph_mem[GRAPH_MEM_BYTES];
    ggml_context *   context = ggml_init({ sizeof(graph_mem), graph_mem, /*no_alloc =*/ true });
    ggml_tensor *    w       = ggml_new_tensor_2d(context, type, columns, num_outputs);
    ggml_tensor *    a       = ggml_new_tensor_2d(context, GGML_TYPE_F32, columns, rows);
    w->data                  = const_cast<void *>(weight);
    a->data                  = const_cast<float *>(x);
    ggml_tensor * product    = ggml_mul_mat(context, w, a);
    product->data            = y;
    ggml_cgraph * graph      = ggml_new_graph_custom(context, 8, /*grads =*/ false);
    ggml_build_forward_expand(graph, product);
    ggml_cplan           plan = ggml_graph_plan(graph, num_threads, nullptr);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data           = work.data();
    const ggml_status status = ggml_graph_compute(graph, &plan);
    ggml_free(context);
    if (status != GGML_STATUS_SUCCESS) {
        throw bridge_error(join("ggml could not compute the product of ", ggml_type_name(type), " blocks: ", ggml_status_to_string(status)));
    }
}

static void mul_mat(const std::string & type_name, const py::handle & blocks, const py::handle & x, const py::handle & out, int num_threads) {
    const ggml_type       type   = quant_type(type_name);
    const borrowed_tensor input  = matrix_borrow(x, "x", dtype::f32, -1, -1);
    const int64_t         rows = input.dim(0), columns = input.dim(1);
    PYGGTRAIN_CHECK(columns > 0 && columns % ggml_blck_size(type) == 0, "x", join("of shape ", shape_text(input.shape)),
                    join("columns that are a positive multiple of ", ggml_blck_size(type), ", the block size of ", type_name));
    const borrowed_tensor weight = matrix_borrow(blocks, "blocks", dtype::u8, -1, (int64_t) ggml_row_size(type, columns));
    const borrowed_tensor output = matrix_borrow(out, "out", dtype::f32, rows, weight.dim(0));
    PYGGTRAIN_CHECK(num_threads >= 1 && num_threads <= 512, "num_threads", num_threads, "1 to 512");
    PYGGTRAIN_CHECK(ggml_get_type_traits_cpu(type)->vec_dot != nullptr, "type", type_name, "a type that ggml can multiply on the CPU");

    py::gil_scoped_release release;
    if (rows == 0 || weight.dim(0) == 0) {
        return;
    }
    product_cpu(type, weight.data, weight.dim(0), columns, static_cast<const float *>(input.data), rows, static_cast<float *>(output.data), num_threads);
}

void register_matmul_cpu(py::module_ & module) {
    module.def("mul_mat", &mul_mat, py::arg("type"), py::arg("blocks"), py::arg("x"), py::arg("out"), py::arg("num_threads"),
               "out [M, N] = x [M, K] W^T with W given as blocks [N, row_bytes]; ggml's own kernel, which rounds x to 8 bits for "
               "quantised types exactly as llama.cpp does at inference. float32 in and out. The GIL is released.");
}

} // namespace pyggtrain
