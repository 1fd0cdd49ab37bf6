// pyggtrain._bridge: registration only.
#include <pybind11/pybind11.h>

#include "bindings.h"
#include "check.h"
#include "ggml-cpu.h"
#include "llama_log.h"

PYBIND11_MODULE(_bridge, module) {
    namespace py = pybind11;
    using namespace pyggtrain;

    module.doc()                    = "pyggtrain's bridge to ggml and llama.cpp. Every broken precondition is an exception of pyggtrain.errors.";
    module.attr("LLAMA_CPP_COMMIT") = PYGGTRAIN_LLAMA_CPP_COMMIT;

    const py::module_ errors = py::module_::import("pyggtrain.errors");
    static const py::handle bridge_error_type = py::object(errors.attr("BridgeError")).release();
    static const py::handle gguf_error_type   = py::object(errors.attr("GGUFError")).release();
    py::register_local_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) {
                std::rethrow_exception(pointer);
            }
        } catch (const gguf_error & error) {
            PyErr_SetString(gguf_error_type.ptr(), error.what());
        } catch (const bridge_error & error) {
            PyErr_SetString(bridge_error_type.ptr(), error.what());
        }
    });

    // Fills ggml's float16 tables, which every conversion reads.
    ggml_cpu_init();
    llama_start();

    register_tensor_view(module);
    register_quant(module);
    register_finite(module);
    register_gguf_file(module);
    register_graph(module);
    register_matmul_cpu(module);
    register_matmul_cuda(module);
    register_tokenizer(module);
    register_session(module);
}
