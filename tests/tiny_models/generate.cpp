// Tiny random models of every architecture, from the fixture that llama.cpp's own tests hold.
//
//   generate                                  the table of architectures: one line "name kind" for each file that may be asked for
//   generate <architecture> <kind> <path>     writes one; kind is "dense" or "moe". May abort: run it in a process of its own.
//
// The fixture's keys are taken as they are, but for a choice of experts that is one. Its weights (all drawn from N(0, 0.1), norms too)
// are not: they make attention nearly uniform, and then a wrong weight hardly shows in the logits. Here every tensor has about the
// size that it has in a trained model. The file holds every tensor that the loader asks for, optional ones too.
#define main fixture_main
#include PYGGTRAIN_FIXTURE
#undef main

#include <unordered_set>

#include "../src/llama-model.h"

static uint64_t name_hash(const std::string & name) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (const unsigned char c : name) {
        hash = (hash ^ c) * 0x100000001b3u;
    }
    return hash;
}

static bool has(const std::string & name, const char * part) {
    return name.find(part) != std::string::npos;
}

static bool ends(const std::string & name, const std::string & end) {
    return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
}

// Mean and deviation of a tensor's numbers.
static std::pair<float, float> weight_scale(const ggml_tensor * tensor) {
    const std::string name = tensor->name;
    if (has(name, "rope_f")) {
        return { 1.5f, 0.1f };
    }
    if (has(name, "norm") && !ends(name, ".bias") && !has(name, "norm_a")) {
        return { 1.0f, 0.1f };
    }
    if (ends(name, ".scale") || has(name, "_scale") || ends(name, "ssm_d")) {
        return { 1.0f, 0.1f };
    }
    if (has(name, "token_embd") || has(name, "sinks")) {
        return { 0.0f, 1.0f };
    }
    if (ends(name, ".bias") || tensor->ne[1] == 1) {
        return { 0.0f, 0.2f };
    }
    return { 0.0f, 1.2f / std::sqrt((float) tensor->ne[0]) };
}

static void draw_tensor(ggml_tensor * tensor, void * /*user_data*/) {
    const std::string name  = tensor->name;
    const auto        scale = weight_scale(tensor);
    uint64_t          state = name_hash(name);
    const int64_t     count = ggml_nelements(tensor);
    if (tensor->type == GGML_TYPE_I32) {
        // Tables of experts by token.
        std::vector<int32_t> values(count);
        for (int64_t i = 0; i < count; i++) {
            values[i] = (int32_t) ((i + i / tensor->ne[0]) % 4);
        }
        ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
        return;
    }
    std::vector<float> values(count);
    for (float & value : values) {
        // Uniform, with the wanted deviation: splitmix64 (Steele et al. 2014), since a file holds millions of numbers.
        uint64_t bits = state += 0x9e3779b97f4a7c15u;
        bits          = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
        bits          = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
        bits ^= bits >> 31;
        value = scale.first + scale.second * 3.4641016f * ((float) (bits >> 40) * 0x1p-24f - 0.5f);
        if (has(name, "ssm_a") && !has(name, "ssm_alpha")) {
            // The logarithm of a decay.
            value = -std::fabs(value) - 0.1f;
        }
    }
    if (tensor->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
    } else if (tensor->type == GGML_TYPE_F16) {
        std::vector<ggml_fp16_t> half(count);
        ggml_fp32_to_fp16_row(values.data(), half.data(), count);
        ggml_backend_tensor_set(tensor, half.data(), 0, ggml_nbytes(tensor));
    } else {
        throw std::runtime_error("the fixture asks for " + name + " as " + ggml_type_name(tensor->type));
    }
}

// What the fixture leaves out or has no values for that work.
static void complete(llm_arch arch, gguf_context * keys) {
    const auto set = [&](const char * key, uint32_t value) {
        gguf_set_val_u32(keys, (std::string(llm_arch_name(arch)) + "." + key).c_str(), value);
    };
    if (gguf_find_key(keys, (std::string(llm_arch_name(arch)) + ".expert_count").c_str()) >= 0) {
        // The fixture uses two experts of two, which leaves nothing to choose.
        set("expert_count", 4);
    }
    switch (arch) {
        case LLM_ARCH_RWKV7:
        case LLM_ARCH_ARWKV7:
            for (const char * part : { "decay", "iclr", "value_residual_mix", "gate" }) {
                set((std::string("attention.") + part + "_lora_rank").c_str(), 32);
            }
            break;
        case LLM_ARCH_PLM:
            set("attention.key_length", 128);
            set("attention.value_length", 128);
            set("rope.dimension_count", 32);
            break;
        case LLM_ARCH_GEMMA4: {
            const bool pattern[] = { true, true, true, true, false };
            gguf_set_arr_data(keys, "gemma4.attention.sliding_window_pattern", GGUF_TYPE_BOOL, pattern, 5);
            set("rope.dimension_count_swa", 64);
            break;
        }
        case LLM_ARCH_GRANITE_SWITCH: {
            const int32_t activate[] = { 1, 2 }, substitute[] = { 3, 4 };
            set("adapters.count", 2);
            set("adapters.lora_rank", 8);
            gguf_set_arr_data(keys, "graniteswitch.adapters.token_ids_activate", GGUF_TYPE_INT32, activate, 2);
            gguf_set_arr_data(keys, "graniteswitch.adapters.token_ids_substitute", GGUF_TYPE_INT32, substitute, 2);
            break;
        }
        default: break;
    }
    if (arch == LLM_ARCH_ARWKV7 || arch == LLM_ARCH_RWKV6QWEN2) {
        set("token_shift_count", 1);
    }
}

static void generate(llm_arch arch, bool moe, const std::string & path) {
    gguf_context_ptr keys = get_gguf_ctx(arch, moe);
    complete(arch, keys.get());
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers       = 0;
    params.use_extra_bufts    = false;
    llama_model_ptr model(llama_model_init_from_user(keys.get(), draw_tensor, nullptr, params));
    if (!model) {
        throw std::runtime_error("llama.cpp cannot make the model");
    }
    gguf_context_ptr file(gguf_init_empty());
    gguf_set_kv(file.get(), keys.get());
    std::unordered_set<std::string> written;
    for (const auto & [name, tensor] : model->tensors_by_name) {
        // Optional, but with it llama.cpp takes the model for an RWKV-6, whose other tensors it does not have.
        if (arch == LLM_ARCH_RWKV6QWEN2 && has(name, "time_mix_first")) {
            continue;
        }
        // A tied head and shared rotation factors are there twice under one name.
        if (written.insert(name).second) {
            gguf_add_tensor(file.get(), tensor);
        }
    }
    if (!gguf_write_to_file(file.get(), path.c_str(), /*only_meta =*/ false)) {
        throw std::runtime_error("cannot write " + path);
    }
}

int main(int argc, char ** argv) {
    if (argc != 1 && argc != 4) {
        std::fprintf(stderr, "usage: %s [architecture dense|moe path]\n", argv[0]);
        return 2;
    }
    try {
        if (argc == 1) {
            for (const llm_arch arch : llm_arch_all()) {
                if (arch == LLM_ARCH_UNKNOWN) {
                    continue;
                }
                if (!moe_mandatory(arch) && arch != LLM_ARCH_DEEPSEEK2OCR) {
                    std::printf("%s dense\n", llm_arch_name(arch));
                }
                if (moe_implemented(arch) || arch == LLM_ARCH_DEEPSEEK2OCR) {
                    std::printf("%s moe\n", llm_arch_name(arch));
                }
            }
            return 0;
        }
        const llm_arch arch = llm_arch_from_string(argv[1]);
        if (arch == LLM_ARCH_UNKNOWN) {
            throw std::runtime_error(std::string(argv[1]) + " is no architecture of llama.cpp");
        }
        generate(arch, std::string(argv[2]) == "moe", argv[3]);
    } catch (const std::exception & error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
