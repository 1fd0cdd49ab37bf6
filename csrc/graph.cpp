// llama.cpp's compute graph of a file, as plain data. Nothing is computed and no weight is read: the model is loaded without memory,
// and the graph is built the way llama.cpp builds it before it reserves its buffers.
//
// llama.cpp aborts the process where it cannot build a graph, so this runs in a child process (pyggtrain/graph/capture.py).
//
// The graph wanted is that of training (`llama_cparams::training`): attention reads the keys and values of the tokens at hand instead
// of a cache. Flash attention stays on, which llama.cpp's own training would switch off: the whole of an attention is then one node
// that names its mask, scale, soft-cap and sinks, and needs no pattern to be recognised. A few models abort that way and run only with a cache and
// without flash attention: `with_cache`.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "bindings.h"
#include "check.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "llama-adapter.h"
#include "llama-arch.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-graph.h"
#include "llama-memory.h"
#include "llama-model.h"
#include "llama.h"
#include "llama_log.h"

namespace pyggtrain {

namespace py = pybind11;

// One tensor of a graph. Dimensions, strides and every parameter that names a dimension are in torch order.
struct graph_tensor {
    std::string          name;
    std::string          op;
    std::string          role;
    std::string          type;
    std::vector<int64_t> shape;
    std::vector<int64_t> strides;
    std::vector<int64_t> params;
    std::vector<int64_t> sources;
    int64_t              view_parent = -1;
    int64_t              view_offset = 0;
    // Of an input of `capture_decode`: the bytes that llama.cpp wrote into it.
    std::string          value;
};

static constexpr int NUM_PARAMS = GGML_MAX_OP_PARAMS / sizeof(int32_t);

static std::string op_name(const ggml_tensor * tensor) {
    switch (tensor->op) {
        case GGML_OP_UNARY: return join("UNARY.", ggml_unary_op_name(ggml_get_unary_op(tensor)));
        case GGML_OP_GLU:   return join("GLU.", ggml_glu_op_name(ggml_get_glu_op(tensor)));
        default:            return ggml_op_name(tensor->op);
    }
}

static std::vector<int64_t> op_params(const ggml_tensor * tensor) {
    int32_t raw[NUM_PARAMS];
    std::memcpy(raw, tensor->op_params, sizeof(raw));
    std::vector<int64_t> params(raw, raw + NUM_PARAMS);
    const auto           turned = [](int64_t dim) { return GGML_MAX_DIMS - 1 - dim; };
    switch (tensor->op) {
        case GGML_OP_PERMUTE:
            // ggml says where each dimension goes, torch where each one comes from.
            for (int i = 0; i < GGML_MAX_DIMS; i++) {
                params[(size_t) turned(raw[i])] = turned(i);
            }
            break;
        case GGML_OP_CONCAT: params[0] = turned(raw[0]); break;
        case GGML_OP_SET:
        case GGML_OP_ACC:    std::swap(params[0], params[2]); break;
        default:             break;
    }
    return params;
}

// What the inputs of a graph mean. llama.cpp names tensors for people (both masks have one name); their owners know which is which.
struct input_meanings {
    std::unordered_map<const ggml_tensor *, std::string> by_tensor;

    void add(const ggml_tensor * tensor, const char * meaning) {
        if (tensor != nullptr) {
            by_tensor.emplace(tensor, meaning);
        }
    }

    void add(const llm_graph_input_attn_kv * kv) {
        add(kv->self_k_idxs, "k_idxs");
        add(kv->self_v_idxs, "v_idxs");
        add(kv->self_kq_mask, "kq_mask");
        add(kv->self_k_rot, "k_rot");
        add(kv->self_v_rot, "v_rot");
    }

    void add(const llm_graph_input_attn_k * k) {
        add(k->self_k_idxs, "k_idxs");
        add(k->self_kq_mask, "kq_mask");
    }

    void add(const llm_graph_input_attn_kv_iswa * kv) {
        add(kv->self_k_idxs, "k_idxs");
        add(kv->self_v_idxs, "v_idxs");
        add(kv->self_k_idxs_swa, "k_idxs_swa");
        add(kv->self_v_idxs_swa, "v_idxs_swa");
        add(kv->self_kq_mask, "kq_mask");
        add(kv->self_kq_mask_swa, "kq_mask_swa");
        add(kv->self_k_rot, "k_rot");
        add(kv->self_v_rot, "v_rot");
        add(kv->self_k_rot_swa, "k_rot_swa");
        add(kv->self_v_rot_swa, "v_rot_swa");
    }

    void add(const llm_graph_input_attn_k_dsa * dsa) {
        add(dsa->self_k_idxs_mla, "k_idxs");
        add(dsa->self_k_idxs_lid, "k_idxs");
        add(dsa->self_kq_mask_mla, "kq_mask");
        add(dsa->self_kq_mask_lid, "kq_mask");
        add(dsa->self_k_rot_lid, "k_rot");
    }

    void add(const llm_graph_input_rs * rs) { add(rs->s_copy, "s_copy"); }

    void add(const llm_graph_input_i * input) {
        if (const auto * embd = dynamic_cast<const llm_graph_input_embd *>(input)) {
            add(embd->tokens, "tokens");
            add(embd->embd, "embeddings");
        } else if (const auto * pos = dynamic_cast<const llm_graph_input_pos *>(input)) {
            add(pos->pos, pos->n_pos_per_embd == 4 ? "positions_4" : "positions");
        } else if (const auto * temp = dynamic_cast<const llm_graph_input_attn_temp *>(input)) {
            add(temp->attn_scale, "attn_temperature");
        } else if (const auto * out = dynamic_cast<const llm_graph_input_out_ids *>(input)) {
            add(out->out_ids, "out_ids");
        } else if (const auto * no_cache = dynamic_cast<const llm_graph_input_attn_no_cache *>(input)) {
            add(no_cache->self_kq_mask, "kq_mask");
            add(no_cache->self_kq_mask_swa, "kq_mask_swa");
        } else if (const auto * msa = dynamic_cast<const llm_graph_input_attn_kv_msa *>(input)) {
            add(static_cast<const llm_graph_input_attn_kv *>(msa));
            add(msa->self_k_idxs_idx, "k_idxs");
        } else if (const auto * kv = dynamic_cast<const llm_graph_input_attn_kv *>(input)) {
            add(kv);
        } else if (const auto * k = dynamic_cast<const llm_graph_input_attn_k *>(input)) {
            add(k);
        } else if (const auto * dsa = dynamic_cast<const llm_graph_input_attn_k_dsa *>(input)) {
            add(dsa);
        } else if (const auto * dsa_iswa = dynamic_cast<const llm_graph_input_attn_k_dsa_iswa *>(input)) {
            add(dsa_iswa->get_dsa());
            add(dsa_iswa->get_swa()->self_k_idxs, "k_idxs_swa");
            add(dsa_iswa->get_swa()->self_kq_mask, "kq_mask_swa");
        } else if (const auto * k_iswa = dynamic_cast<const llm_graph_input_attn_k_iswa *>(input)) {
            add(k_iswa->self_k_idxs, "k_idxs");
            add(k_iswa->self_k_idxs_swa, "k_idxs_swa");
            add(k_iswa->self_kq_mask, "kq_mask");
            add(k_iswa->self_kq_mask_swa, "kq_mask_swa");
            add(k_iswa->self_k_rot, "k_rot");
            add(k_iswa->self_k_rot_swa, "k_rot_swa");
        } else if (const auto * iswa = dynamic_cast<const llm_graph_input_attn_kv_iswa *>(input)) {
            add(iswa);
        } else if (const auto * rs = dynamic_cast<const llm_graph_input_rs *>(input)) {
            add(rs);
        } else if (const auto * hybrid = dynamic_cast<const llm_graph_input_mem_hybrid *>(input)) {
            add(hybrid->get_attn());
            add(hybrid->get_recr());
        } else if (const auto * hybrid_k = dynamic_cast<const llm_graph_input_mem_hybrid_k *>(input)) {
            add(hybrid_k->get_attn());
            add(hybrid_k->get_recr());
        } else if (const auto * hybrid_iswa = dynamic_cast<const llm_graph_input_mem_hybrid_iswa *>(input)) {
            add(hybrid_iswa->get_attn());
            add(hybrid_iswa->get_recr());
        }
    }
};

struct graph_source {
    std::string                                               path;
    std::unique_ptr<llama_model, decltype(&llama_model_free)> model;
    // What leaves are: weights of the file and the halves of the probing adapter.
    std::unordered_map<const ggml_tensor *, std::string> weights;
    std::unordered_map<const ggml_tensor *, std::string> halves_a;
    std::unordered_map<const ggml_tensor *, std::string> halves_b;
    llama_adapter_lora *                                 adapter = nullptr;

    graph_source(std::string file, bool with_lora) : path(std::move(file)), model(nullptr, llama_model_free) {
        llama_log_clear();
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers       = 0;
        params.no_alloc           = true;
        params.load_mode          = LLAMA_LOAD_MODE_NONE;
        params.use_extra_bufts    = false;
        model.reset(llama_model_load_from_file(path.c_str(), params));
        if (model == nullptr) {
            throw bridge_error(join(path, ": llama.cpp cannot load the model: ", llama_log_complaints()));
        }
        for (const auto & [name, tensor] : model->tensors_by_name) {
            weights.emplace(tensor, name);
        }
        if (with_lora) {
            add_adapter();
        }
    }

    // Stacks of experts take another way, which knows the scales.
    bool is_scaled_nvfp4_ffn(const std::string & name, const ggml_tensor * w) const {
        const size_t stem = name.size() < 7 ? 0 : name.size() - 7;
        return w->type == GGML_TYPE_NVFP4 && w->ne[2] == 1 && name.find(".ffn_") != std::string::npos && name.compare(stem, 7, ".weight") == 0 &&
               model->get_tensor((name.substr(0, stem) + ".scale").c_str()) != nullptr;
    }

    // An adapter of rank 1 on every tensor, without memory: the pairs that turn up in the graph are those that llama.cpp applies.
    // It belongs to the model, which frees it, and must be there before a context is made, which sizes its graph by it.
    void add_adapter() {
        // Built in two steps, so that an exception leaves no half-made adapter behind.
        auto                   fresh  = std::make_unique<llama_adapter_lora>(model.get());
        const ggml_init_params params = { 2 * (model->tensors_by_name.size() + 1) * ggml_tensor_overhead(), nullptr, /*no_alloc =*/ true };
        ggml_context *         ctx    = ggml_init(params);
        PYGGTRAIN_CHECK(ctx != nullptr, path, "too large for the probing adapter", "memory for its tensors");
        fresh->ctxs.emplace_back(ctx);
        // A buffer of no bytes says that the tensors need none of the scheduler.
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 0);
        fresh->bufs.emplace_back(buffer);
        fresh->alpha = 1.0f;
        for (const auto & [name, w] : model->tensors_by_name) {
            // An adapter on the embedding adds rows, not a product; on a tied one llama.cpp aborts. It is never trained (models/model.py).
            // On an NVFP4 feed-forward weight with a scale of its own llama.cpp aborts too (llama-graph.cpp, build_ffn).
            if (name == "token_embd.weight" || fresh->ab_map.count(name) > 0 || is_scaled_nvfp4_ffn(name, w)) {
                continue;
            }
            ggml_tensor * a = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, w->ne[0], 1, w->ne[2]);
            ggml_tensor * b = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, w->ne[1], w->ne[2]);
            a->buffer = b->buffer = buffer;
            halves_a.emplace(a, name);
            halves_b.emplace(b, name);
            fresh->ab_map.emplace(name, llama_adapter_lora_weight(a, b));
        }
        adapter = fresh.release();
        adapter->model->loras.insert(adapter);
    }

    using context_ptr = std::unique_ptr<llama_context, decltype(&llama_free)>;

    context_ptr make_context(int64_t num_tokens, int64_t num_outputs, int64_t num_ctx, bool with_cache) {
        PYGGTRAIN_CHECK(num_tokens >= 256 && num_tokens <= (1 << 16) && num_tokens % 256 == 0, "num_tokens", num_tokens, "a multiple of 256 up to 2^16");
        PYGGTRAIN_CHECK(num_outputs >= 1 && num_outputs <= num_tokens, "num_outputs", num_outputs, "1 to num_tokens");
        PYGGTRAIN_CHECK(num_ctx >= 1 && num_ctx <= (1 << 30), "num_ctx", num_ctx, "1 to 2^30");
        llama_log_clear();
        llama_context_params params = llama_context_default_params();
        params.n_ctx = params.n_batch = params.n_ubatch = (uint32_t) num_tokens;
        params.type_k = params.type_v = GGML_TYPE_F32;
        params.flash_attn_type        = with_cache ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_ENABLED;
        params.offload_kqv            = false;
        params.op_offload             = false;
        params.swa_full               = true;
        params.no_perf                = true;
        context_ptr context(llama_init_from_model(model.get(), params), llama_free);
        if (context == nullptr) {
            throw bridge_error(join(path, ": llama.cpp cannot make a context of ", num_tokens, " tokens: ", llama_log_complaints()));
        }
        if (adapter != nullptr) {
            float scale = 1.0f;
            llama_set_adapters_lora(context.get(), &adapter, 1, &scale);
        }
        // The context is ours and no const object: two of its settings have no public way in. `training` is what llama_opt_init sets;
        // `n_ctx_seq`, the context that will be served with, decides between long and short rope factors.
        auto & settings    = const_cast<llama_cparams &>(context->get_cparams());
        settings.training  = !with_cache;
        settings.n_ctx_seq = (uint32_t) num_ctx;
        return context;
    }

    std::vector<graph_tensor> capture(int64_t num_tokens, int64_t num_outputs, int64_t num_ctx, bool with_cache) {
        const context_ptr        context = make_context(num_tokens, num_outputs, num_ctx, with_cache);
        llama_memory_context_ptr memory;
        if (context->get_memory() != nullptr) {
            memory = context->get_memory()->init_full();
        }
        return describe(*context, num_tokens, num_outputs, memory.get(), nullptr);
    }

    // The graph of one real document from its first token on, and what llama.cpp writes into its inputs. Nothing is computed here
    // either: the inputs get memory of their own, and all else has none.
    std::vector<graph_tensor> capture_decode(const std::vector<int64_t> & tokens, int64_t num_outputs, int64_t num_ctx) {
        const auto        num_tokens = (int64_t) tokens.size();
        const context_ptr context    = make_context(num_tokens, num_outputs, num_ctx, /*with_cache =*/ false);
        PYGGTRAIN_CHECK(context->get_memory() != nullptr, path, "a model without a memory", "one that decodes token by token");
        llama_batch_ext batch(context.get());
        for (int64_t i = 0; i < num_tokens; i++) {
            PYGGTRAIN_CHECK(tokens[(size_t) i] >= 0 && tokens[(size_t) i] < (int64_t) model->vocab.n_tokens(), "token id", tokens[(size_t) i],
                            "a token of the model");
            const int32_t                                    index    = batch.add_token(0);
            const std::array<llama_pos, GGML_MROPE_SECTIONS> position = { (llama_pos) i, (llama_pos) i, (llama_pos) i, (llama_pos) i };
            batch.set_token_id(index, (llama_token) tokens[(size_t) i]);
            batch.set_token_pos(index, position.data());
            batch.set_output(index, i < num_outputs);
        }
        llama_batch_allocr allocator(model->hparams.n_pos_per_embd());
        if (!allocator.init(batch, model->vocab, /*output_all =*/ false)) {
            throw bridge_error(join(path, ": llama.cpp refuses a document of ", num_tokens, " tokens: ", llama_log_complaints()));
        }
        const llama_memory_context_ptr memory = context->get_memory()->init_batch(allocator, (uint32_t) num_tokens, /*embd_all =*/ false);
        if (memory == nullptr || llama_memory_status_is_fail(memory->get_status()) || !memory->apply()) {
            throw bridge_error(join(path, ": llama.cpp finds no room for a document of ", num_tokens, " tokens: ", llama_log_complaints()));
        }
        const llama_ubatch & ubatch = memory->get_ubatch();
        PYGGTRAIN_CHECK(ubatch.n_tokens == (uint32_t) num_tokens, path, join("decoded in parts, the first of ", ubatch.n_tokens, " tokens"), "one part");
        return describe(*context, num_tokens, num_outputs, memory.get(), &ubatch);
    }

    std::vector<graph_tensor> describe(llama_context & context, int64_t num_tokens, int64_t num_outputs, const llama_memory_context_i * memory,
                                       const llama_ubatch * ubatch) const {
        ggml_cgraph * graph = context.graph_reserve((uint32_t) num_tokens, 1, (uint32_t) num_outputs, memory, /*split_only =*/ true);
        if (graph == nullptr) {
            throw bridge_error(join(path, ": llama.cpp cannot build the graph of ", num_tokens, " tokens: ", llama_log_complaints()));
        }
        llm_graph_result * result = context.get_gf_res_reserve();
        PYGGTRAIN_CHECK(result->get_logits() != nullptr, path, "a model without logits", "a text decoder");
        input_meanings meanings;
        for (const auto & input : result->inputs) {
            meanings.add(input.get());
        }
        // Some models look tokens up in a table of their own.
        meanings.add(result->get_inp_tokens(), "tokens");
        // They must live as long as their tensors are read.
        std::vector<ggml_backend_buffer_ptr> buffers;
        if (ubatch != nullptr) {
            for (ggml_tensor * tensor = ggml_get_first_tensor(result->get_ctx()); tensor != nullptr; tensor = ggml_get_next_tensor(result->get_ctx(), tensor)) {
                if ((tensor->flags & GGML_TENSOR_FLAG_INPUT) != 0 && tensor->data == nullptr && tensor->view_src == nullptr) {
                    buffers.emplace_back(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), std::max<size_t>(1, ggml_nbytes(tensor))));
                    tensor->buffer = nullptr;
                    ggml_backend_tensor_alloc(buffers.back().get(), tensor, ggml_backend_buffer_get_base(buffers.back().get()));
                    std::memset(tensor->data, 0, ggml_nbytes(tensor));
                }
            }
            result->set_inputs(ubatch);
        }
        return describe(graph, result->get_logits(), meanings, /*with_values =*/ ubatch != nullptr);
    }

    // Every tensor of the graph after those that it reads, in llama.cpp's order of computing; the last one holds the logits.
    std::vector<graph_tensor> describe(ggml_cgraph * graph, const ggml_tensor * logits, const input_meanings & meanings, bool with_values) const {
        std::vector<graph_tensor>                        tensors;
        std::unordered_map<const ggml_tensor *, int64_t> numbers;
        const auto number_of = [&](const auto & self, const ggml_tensor * tensor) -> int64_t {
            const auto known = numbers.find(tensor);
            if (known != numbers.end()) {
                return known->second;
            }
            graph_tensor described;
            int          num_sources = GGML_MAX_SRC;
            while (num_sources > 0 && tensor->src[num_sources - 1] == nullptr) {
                num_sources--;
            }
            for (int i = 0; i < num_sources; i++) {
                // A cast names itself as its target.
                const bool is_absent = tensor->src[i] == nullptr || tensor->src[i] == tensor;
                described.sources.push_back(is_absent ? -1 : self(self, tensor->src[i]));
            }
            described.view_parent = tensor->view_src == nullptr ? -1 : self(self, tensor->view_src);
            described.view_offset = (int64_t) tensor->view_offs;
            described.name        = tensor->name;
            described.op          = op_name(tensor);
            described.type        = ggml_type_name(tensor->type);
            described.params      = op_params(tensor);
            for (int i = GGML_MAX_DIMS; i-- > 0;) {
                described.shape.push_back(tensor->ne[i]);
                described.strides.push_back((int64_t) tensor->nb[i]);
            }
            if (tensor->op == GGML_OP_NONE && tensor->view_src == nullptr) {
                describe_leaf(tensor, meanings, described);
                if (with_values && described.role == "unknown_input" && tensor->data != nullptr) {
                    described.value.assign(static_cast<const char *>(tensor->data), ggml_nbytes(tensor));
                }
            } else {
                described.role = "node";
            }
            numbers.emplace(tensor, (int64_t) tensors.size());
            tensors.push_back(std::move(described));
            return numbers[tensor];
        };
        for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
            number_of(number_of, ggml_graph_node(graph, i));
        }
        tensors.resize((size_t) number_of(number_of, logits) + 1);
        return tensors;
    }

    void describe_leaf(const ggml_tensor * tensor, const input_meanings & meanings, graph_tensor & described) const {
        const auto named = [&](const char * role, const std::unordered_map<const ggml_tensor *, std::string> & names) {
            const auto found = names.find(tensor);
            if (found == names.end()) {
                return false;
            }
            described.role = role;
            described.name = found->second;
            return true;
        };
        if (named("weight", weights) || named("lora_a", halves_a) || named("lora_b", halves_b) || named("input", meanings.by_tensor)) {
            return;
        }
        described.role = (tensor->flags & GGML_TENSOR_FLAG_INPUT) != 0 ? "unknown_input" : "state";
    }

    const llama_hparams & hparams() const { return model->hparams; }

    std::string window_type() const {
        switch (hparams().swa_type) {
            case LLAMA_SWA_TYPE_NONE:      return "none";
            case LLAMA_SWA_TYPE_STANDARD:  return "standard";
            case LLAMA_SWA_TYPE_CHUNKED:   return "chunked";
            case LLAMA_SWA_TYPE_SYMMETRIC: return "symmetric";
        }
        return "unknown";
    }
};

void register_graph(py::module_ & module) {
    py::class_<graph_tensor>(module, "GraphTensor", "One tensor of a compute graph: an operation's result, or a leaf.")
        .def_readonly("name", &graph_tensor::name)
        .def_readonly("op", &graph_tensor::op)
        .def_readonly("role", &graph_tensor::role)
        .def_readonly("type", &graph_tensor::type)
        .def_readonly("shape", &graph_tensor::shape)
        .def_readonly("strides", &graph_tensor::strides)
        .def_readonly("params", &graph_tensor::params)
        .def_readonly("sources", &graph_tensor::sources)
        .def_readonly("view_parent", &graph_tensor::view_parent)
        .def_readonly("view_offset", &graph_tensor::view_offset)
        .def_property_readonly("value", [](const graph_tensor & self) { return py::bytes(self.value); });
    py::class_<graph_source>(module, "GraphSource",
                             "llama.cpp's compute graphs of a file, whose weights are not read. May abort the process: call it in a child.")
        .def(py::init<std::string, bool>(), py::arg("path"), py::kw_only(), py::arg("with_lora"))
        .def("capture", &graph_source::capture, py::kw_only(), py::arg("num_tokens"), py::arg("num_outputs"), py::arg("num_ctx"), py::arg("with_cache") = false,
             "Every tensor of the graph, each after those that it reads; the last one holds the logits. With a cache: that of serving without flash attention.")
        .def("capture_decode", &graph_source::capture_decode, py::kw_only(), py::arg("tokens"), py::arg("num_outputs"), py::arg("num_ctx"),
             "As capture, for one document from its first token on, with the bytes that llama.cpp writes into inputs without a known meaning.")
        .def_property_readonly("num_tokens", [](const graph_source & self) { return (int64_t) self.model->vocab.n_tokens(); })
        .def_property_readonly("window", [](const graph_source & self) { return (int64_t) self.hparams().n_swa; })
        .def_property_readonly("window_type", &graph_source::window_type)
        .def_property_readonly("is_causal", [](const graph_source & self) { return self.hparams().causal_attn; })
        .def_property_readonly("is_diffusion", [](const graph_source & self) { return llama_model_is_diffusion(self.model.get()); })
        .def_property_readonly("uses_alibi", [](const graph_source & self) { return self.hparams().use_alibi; })
        .def_property_readonly(
            "attn_temperature",
            [](const graph_source & self) {
                const llama_hparams & h = self.hparams();
                return py::make_tuple(h.n_attn_temp_floor_scale, h.f_attn_temp_scale, h.f_attn_temp_offset);
            },
            "(floor, scale, offset): queries at position p are multiplied by 1 + scale ln(1 + floor((p + offset) / floor)).")
        .def_property_readonly("context_length", [](const graph_source & self) { return (int64_t) self.hparams().n_ctx_train; });
    module.def(
        "architectures",
        [] {
            std::vector<std::string> names;
            for (const llm_arch arch : llm_arch_all()) {
                if (arch != LLM_ARCH_UNKNOWN) {
                    names.emplace_back(llm_arch_name(arch));
                }
            }
            return names;
        },
        "general.architecture of every architecture that this llama.cpp knows, in its own order.");
}

} // namespace pyggtrain
