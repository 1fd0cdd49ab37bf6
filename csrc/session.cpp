// llama.cpp running one model on the CPU: what a person who serves the file would get. Used to prove parity.
//
// A session owns its model, context and adapters. Calls on one session must not overlap (the GIL is released while llama.cpp
// computes; a mutex makes overlapping calls wait). Every call starts from an empty memory (KV cache).
//
// With `exact_products` each product by a weight that is not F32 is computed again from the decoded weight in float32, and
// replaces ggml's own, which rounds the other side to 8 bits (or to F16, BF16). All else stays llama.cpp's: the difference to a
// plain session is what that rounding does.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "bindings.h"
#include "check.h"
#include "exact_product.h"
#include "ggml-backend.h"
#include "gguf.h"
#include "gguf_file.h"
#include "llama-adapter.h"
#include "llama-model.h"
#include "llama.h"
#include "llama_log.h"
#include "tensor_view.h"

namespace pyggtrain {

// llama.cpp reads these keys of an adapter as the type that it expects, and aborts on any other. Whether they are there and hold
// what they must is something that it checks itself.
static void check_adapter_keys(const gguf_file & file) {
    const std::pair<const char *, uint32_t> expected[] = {
        { "general.type",         GGUF_TYPE_STRING  },
        { "general.architecture", GGUF_TYPE_STRING  },
        { "adapter.type",         GGUF_TYPE_STRING  },
        { "adapter.lora.alpha",   GGUF_TYPE_FLOAT32 },
    };
    for (const auto & [key, type] : expected) {
        const auto found = file.values.find(key);
        if (found != file.values.end()) {
            const gguf_value & value = found->second;
            PYGGTRAIN_CHECK(!value.is_array && value.type == type, join(file.path, ": ", key),
                            join("of type ", value.is_array ? "arr of " : "", value_type_name(value.type)), value_type_name(type));
        }
    }
}

struct captured_tensor {
    std::string name;
    std::string op;
    tensor_view value;
};

struct session {
    std::unique_ptr<llama_model, decltype(&llama_model_free)> model;
    std::unique_ptr<llama_context, decltype(&llama_free)>     context;
    const llama_vocab *                                       vocab = nullptr;
    std::vector<llama_adapter_lora *>                         adapters;
    std::mutex                                                mutex;

    const bool exact_products;
    const int  num_threads;

    // Set only while eval_tensors() runs.
    const std::unordered_set<std::string> * wanted = nullptr;
    std::vector<captured_tensor>            captured;
    std::string                             callback_error;

    session(const std::string & path, int64_t num_ctx, int64_t num_ubatch, int num_threads, const std::string & kv_type, bool flash_attention, bool use_mmap,
            bool exact_products)
        : model(nullptr, llama_model_free), context(nullptr, llama_free), exact_products(exact_products), num_threads(num_threads) {
        PYGGTRAIN_CHECK(num_ctx >= 1 && num_ctx <= (1 << 24), "num_ctx", num_ctx, "1 to 2^24");
        PYGGTRAIN_CHECK(num_ubatch >= 1 && num_ubatch <= num_ctx, "num_ubatch", num_ubatch, "1 to num_ctx");
        PYGGTRAIN_CHECK(num_threads >= 1 && num_threads <= 512, "num_threads", num_threads, "1 to 512");
        PYGGTRAIN_CHECK(kv_type == "F32" || kv_type == "F16", "kv_type", kv_type, "F32 or F16");
        llama_log_clear();
        llama_model_params model_params = llama_model_default_params();
        model_params.n_gpu_layers       = 0;
        model_params.load_mode          = use_mmap ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
        // Those buffers hold blocks in another order than the file, which only their own kernels can read.
        model_params.use_extra_bufts    = !exact_products;
        model.reset(llama_model_load_from_file(path.c_str(), model_params));
        if (model == nullptr) {
            throw bridge_error(join(path, ": llama.cpp cannot load the model: ", llama_log_complaints()));
        }
        vocab = llama_model_get_vocab(model.get());

        llama_context_params params = llama_context_default_params();
        params.n_ctx                = (uint32_t) num_ctx;
        params.n_batch              = (uint32_t) num_ctx;
        params.n_ubatch             = (uint32_t) num_ubatch;
        params.n_threads            = num_threads;
        params.n_threads_batch      = num_threads;
        params.type_k = params.type_v = kv_type == "F32" ? GGML_TYPE_F32 : GGML_TYPE_F16;
        params.flash_attn_type      = flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.swa_full             = true;
        params.no_perf              = true;
        params.cb_eval              = on_eval;
        params.cb_eval_user_data    = this;
        context.reset(llama_init_from_model(model.get(), params));
        if (context == nullptr) {
            throw bridge_error(join(path, ": llama.cpp cannot make a context of ", num_ctx, " tokens: ", llama_log_complaints()));
        }
    }

    void check_open() const { PYGGTRAIN_CHECK(context != nullptr, "session", "closed", "an open session"); }

    // llama.cpp asks for every node first, and hands over those that were asked for once they are computed.
    static bool on_eval(ggml_tensor * tensor, bool ask, void * user_data) {
        auto & self = *static_cast<session *>(user_data);
        const bool is_wanted  = self.wanted != nullptr && self.wanted->count(tensor->name) > 0;
        const bool is_rounded = self.exact_products && exact_product_applies(tensor);
        if (ask) {
            return is_wanted || is_rounded;
        }
        try {
            if (is_rounded) {
                exact_product(tensor, self.num_threads);
            }
            if (is_wanted) {
                self.captured.push_back({ tensor->name, ggml_op_name(tensor->op), tensor_copy(tensor) });
            }
        } catch (const std::exception & error) {
            // An exception may not cross llama.cpp's C frames; decode() raises it afterwards.
            self.callback_error = error.what();
        }
        return true;
    }

    std::vector<llama_token> check_tokens(const std::vector<int64_t> & tokens) const {
        check_open();
        PYGGTRAIN_CHECK(!tokens.empty(), "tokens", "empty", "at least one token");
        PYGGTRAIN_CHECK(tokens.size() <= llama_n_ctx(context.get()), "tokens", join(tokens.size(), " long"), join("at most num_ctx = ", llama_n_ctx(context.get())));
        std::vector<llama_token> ids;
        ids.reserve(tokens.size());
        for (int64_t id : tokens) {
            PYGGTRAIN_CHECK(id >= 0 && id < llama_vocab_n_tokens(vocab), "token id", id, join("0 to ", llama_vocab_n_tokens(vocab) - 1));
            ids.push_back((llama_token) id);
        }
        return ids;
    }

    // Decodes tokens at positions from `first` on; logits are kept for all of them or only for the last.
    void decode(const std::vector<llama_token> & tokens, int32_t first, bool all_logits) {
        llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);
        batch.n_tokens    = (int32_t) tokens.size();
        for (int32_t i = 0; i < batch.n_tokens; i++) {
            batch.token[i]     = tokens[(size_t) i];
            batch.pos[i]       = first + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = all_logits || i == batch.n_tokens - 1;
        }
        llama_log_clear();
        callback_error.clear();
        const int32_t status = llama_decode(context.get(), batch);
        llama_batch_free(batch);
        if (status != 0) {
            throw bridge_error(join("llama.cpp could not decode ", tokens.size(), " tokens (status ", status, "): ", llama_log_complaints()));
        }
        if (!callback_error.empty()) {
            throw bridge_error(callback_error);
        }
    }

    void forget() { llama_memory_clear(llama_get_memory(context.get()), /*data =*/ true); }

    tensor_view logits(const std::vector<int64_t> & tokens) {
        const std::vector<llama_token> ids = check_tokens(tokens);
        py::gil_scoped_release         release;
        std::lock_guard<std::mutex>    lock(mutex);
        forget();
        decode(ids, 0, /*all_logits =*/ true);
        const int64_t num_tokens = llama_vocab_n_tokens(vocab);
        const size_t  num_bytes  = ids.size() * (size_t) num_tokens * sizeof(float);
        auto          copy       = std::shared_ptr<void>(::operator new(num_bytes), [](void * p) { ::operator delete(p); });
        for (size_t i = 0; i < ids.size(); i++) {
            const float * row = llama_get_logits_ith(context.get(), (int32_t) i);
            PYGGTRAIN_CHECK(row != nullptr, "logits", join("missing for position ", i), "logits of every position");
            std::memcpy(static_cast<float *>(copy.get()) + i * (size_t) num_tokens, row, (size_t) num_tokens * sizeof(float));
        }
        return { copy, copy.get(), { (int64_t) ids.size(), num_tokens }, dtype::f32 };
    }

    std::vector<captured_tensor> eval_tensors(const std::vector<int64_t> & tokens, const std::vector<std::string> & names) {
        const std::vector<llama_token>        ids = check_tokens(tokens);
        const std::unordered_set<std::string> set(names.begin(), names.end());
        py::gil_scoped_release                release;
        std::lock_guard<std::mutex>           lock(mutex);
        forget();
        captured.clear();
        wanted = &set;
        try {
            decode(ids, 0, /*all_logits =*/ true);
        } catch (...) {
            wanted = nullptr;
            throw;
        }
        wanted = nullptr;
        return std::move(captured);
    }

    std::vector<llama_token> generate(const std::vector<int64_t> & tokens, int64_t max_new_tokens) {
        std::vector<llama_token> ids = check_tokens(tokens);
        PYGGTRAIN_CHECK(max_new_tokens >= 0, "max_new_tokens", max_new_tokens, "0 or more");
        py::gil_scoped_release      release;
        std::lock_guard<std::mutex> lock(mutex);
        forget();
        std::vector<llama_token> generated;
        int32_t                  position = 0;
        while ((int64_t) generated.size() < max_new_tokens && (size_t) position + ids.size() <= llama_n_ctx(context.get())) {
            decode(ids, position, /*all_logits =*/ false);
            position += (int32_t) ids.size();
            const float * row  = llama_get_logits_ith(context.get(), -1);
            const float * best = std::max_element(row, row + llama_vocab_n_tokens(vocab));
            const auto    next = (llama_token) (best - row);
            if (llama_vocab_is_eog(vocab, next)) {
                break;
            }
            generated.push_back(next);
            ids = { next };
        }
        return generated;
    }

    // What llama.cpp itself does not check and would abort on (or index out of range) in its first decode.
    void check_pair(const std::string & name, const llama_adapter_lora_weight & pair) const {
        const ggml_tensor * weight = model->get_tensor(name.c_str());
        PYGGTRAIN_CHECK(weight != nullptr, name, "not in the model", "a tensor of the base file");
        const bool is_tied_embedding = name == "token_embd.weight" && model->get_tensor("output.weight") == nullptr;
        PYGGTRAIN_CHECK(!is_tied_embedding, name, "also the output head of this model", "no adapter pair on a tied embedding: llama.cpp would abort");
        // build_ffn() asserts it; attention and stacks of experts take such a pair.
        const bool is_scaled_nvfp4 = weight->type == GGML_TYPE_NVFP4 && name.find(".ffn_") != std::string::npos && name.find("_exps.") == std::string::npos &&
                                     model->get_tensor((name.substr(0, name.rfind('.')) + ".scale").c_str()) != nullptr;
        PYGGTRAIN_CHECK(!is_scaled_nvfp4, name, "NVFP4 with a scale of its own", "no adapter pair on such a feed-forward weight: llama.cpp would abort");
        const bool same_experts = pair.a->ne[2] == weight->ne[2] && pair.b->ne[2] == weight->ne[2] && pair.a->ne[3] == 1 && pair.b->ne[3] == 1;
        PYGGTRAIN_CHECK(same_experts, name, join("given as lora_a ", shape_text(tensor_shape(pair.a)), " and lora_b ", shape_text(tensor_shape(pair.b))),
                        join("the same number of experts as the weight ", shape_text(tensor_shape(weight))));
        for (const ggml_tensor * half : { pair.a, pair.b }) {
            PYGGTRAIN_CHECK(half->type == GGML_TYPE_F32 || half->type == GGML_TYPE_F16 || half->type == GGML_TYPE_BF16 || half->type == GGML_TYPE_Q8_0, name,
                            join("given as ", ggml_type_name(half->type)), "F32, F16, BF16 or Q8_0");
        }
    }

    int64_t load_adapter(const std::string & path) {
        check_open();
        py::gil_scoped_release      release;
        std::lock_guard<std::mutex> lock(mutex);
        // Read here first: a broken file is a gguf_error, and llama.cpp does not get to see it.
        check_adapter_keys(*gguf_file_open(path));
        llama_log_clear();
        llama_adapter_lora * adapter = llama_adapter_lora_init(model.get(), path.c_str());
        if (adapter == nullptr) {
            throw bridge_error(join(path, ": llama.cpp cannot load the adapter: ", llama_log_complaints()));
        }
        try {
            for (const auto & [name, pair] : adapter->ab_map) {
                check_pair(name, pair);
            }
        } catch (...) {
            llama_adapter_lora_free(adapter);
            throw;
        }
        adapters.push_back(adapter);
        return (int64_t) adapters.size() - 1;
    }

    llama_adapter_lora * adapter_at(int64_t index) const {
        check_open();
        PYGGTRAIN_CHECK(index >= 0 && index < (int64_t) adapters.size(), "adapter", index, join("a number that load_adapter returned (0 to ", (int64_t) adapters.size() - 1, ")"));
        return adapters[(size_t) index];
    }

    void set_adapters(const std::vector<std::pair<int64_t, float>> & scales) {
        std::vector<llama_adapter_lora *> active;
        std::vector<float>                factors;
        for (const auto & [index, scale] : scales) {
            PYGGTRAIN_CHECK(std::isfinite(scale), "scale", scale, "a finite number");
            active.push_back(adapter_at(index));
            factors.push_back(scale);
        }
        check_open();
        std::lock_guard<std::mutex> lock(mutex);
        llama_set_adapters_lora(context.get(), active.data(), active.size(), factors.data());
    }

    void close() {
        std::lock_guard<std::mutex> lock(mutex);
        adapters.clear();
        context.reset();
        model.reset();
    }
};

void register_session(py::module_ & module) {
    module.def("system_info", [] { return std::string(llama_print_system_info()); }, "What llama.cpp was built for, in its own words: processor features, OpenMP.");
    py::class_<session>(module, "Session", "llama.cpp on the CPU: one model, one context, any number of adapters. Each call starts from an empty KV cache.")
        .def(py::init<const std::string &, int64_t, int64_t, int, const std::string &, bool, bool, bool>(), py::arg("path"), py::kw_only(), py::arg("num_ctx"),
             py::arg("num_ubatch"), py::arg("num_threads"), py::arg("kv_type") = "F16", py::arg("flash_attention") = false, py::arg("use_mmap") = true,
             py::arg("exact_products") = false, py::call_guard<py::gil_scoped_release>(),
             "`exact_products` replaces each product by a weight that is not F32 by one of the decoded weight in float32, which rounds no activation.")
        .def_property_readonly("num_tokens", [](const session & self) { self.check_open(); return llama_vocab_n_tokens(self.vocab); })
        .def_property_readonly("num_ctx", [](const session & self) { self.check_open(); return llama_n_ctx(self.context.get()); })
        .def("load_adapter", &session::load_adapter, py::arg("path"), "Loads a GGUF adapter (not yet active) and returns its number.")
        .def("adapter_num_pairs", [](const session & self, int64_t adapter) { return self.adapter_at(adapter)->ab_map.size(); }, py::arg("adapter"),
             "How many lora_a / lora_b pairs llama.cpp took from the file.")
        .def("set_adapters", &session::set_adapters, py::arg("scales"), "Replaces the active adapters by these (number, scale); an empty list is the base model.")
        .def("logits", &session::logits, py::arg("tokens"), "float32 [len(tokens), num_tokens]: logits after each token.")
        .def("eval_tensors",
             [](session & self, const std::vector<int64_t> & tokens, const std::vector<std::string> & names) {
                 py::list list;
                 for (captured_tensor & tensor : self.eval_tensors(tokens, names)) {
                     list.append(py::make_tuple(tensor.name, tensor.op, std::move(tensor.value)));
                 }
                 return list;
             },
             py::arg("tokens"), py::arg("names"),
             "(name, op, value) of every graph node with one of these names, in the order of computation; a name can occur more than once.")
        .def("generate", &session::generate, py::arg("tokens"), py::arg("max_new_tokens"),
             "Greedy continuation; ends before an end-of-generation token, at max_new_tokens, or when the context is full.")
        .def("close", &session::close, "Frees model and context now; every later call is an error.");
}

} // namespace pyggtrain
