// llama.cpp's own tokenizer, from a vocab-only load of the same GGUF file: no weight is read. A tokenizer is immutable, so
// threads may share it.
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <pybind11/stl.h>

#include "bindings.h"
#include "check.h"
#include "llama.h"
#include "llama_log.h"

namespace pyggtrain {

namespace py = pybind11;

struct tokenizer {
    std::unique_ptr<llama_model, decltype(&llama_model_free)> model;
    const llama_vocab *                                       vocab;

    explicit tokenizer(const std::string & path) : model(nullptr, llama_model_free), vocab(nullptr) {
        llama_log_clear();
        llama_model_params params = llama_model_default_params();
        params.vocab_only         = true;
        params.n_gpu_layers       = 0;
        model.reset(llama_model_load_from_file(path.c_str(), params));
        if (model == nullptr) {
            throw bridge_error(join(path, ": llama.cpp cannot load its tokenizer: ", llama_log_complaints()));
        }
        vocab = llama_model_get_vocab(model.get());
        PYGGTRAIN_CHECK(llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE, path, "a model without a tokenizer", "tokenizer.ggml.* metadata");
    }

    llama_token check_id(int64_t id) const {
        PYGGTRAIN_CHECK(id >= 0 && id < llama_vocab_n_tokens(vocab), "token id", id, join("0 to ", llama_vocab_n_tokens(vocab) - 1));
        return (llama_token) id;
    }

    std::vector<llama_token> encode(const std::string & text, bool add_special, bool parse_special) const {
        // llama.cpp takes the length as int32 and wants room for a token per byte plus BOS and EOS.
        PYGGTRAIN_CHECK(text.size() < (size_t) std::numeric_limits<int32_t>::max() - 16, "text", join(text.size(), " bytes long"), "less than 2 GiB");
        // llama.cpp aborts where it shall add a token that the file does not have.
        PYGGTRAIN_CHECK(!add_special || !llama_vocab_get_add_bos(vocab) || llama_vocab_bos(vocab) != LLAMA_TOKEN_NULL, "tokenizer.ggml.add_bos_token",
                        "true in a file without a BOS token", "tokenizer.ggml.bos_token_id");
        PYGGTRAIN_CHECK(!add_special || !llama_vocab_get_add_eos(vocab) || llama_vocab_eos(vocab) != LLAMA_TOKEN_NULL, "tokenizer.ggml.add_eos_token",
                        "true in a file without an EOS token", "tokenizer.ggml.eos_token_id");
        PYGGTRAIN_CHECK(!add_special || !llama_vocab_get_add_sep(vocab) || llama_vocab_sep(vocab) != LLAMA_TOKEN_NULL, "tokenizer.ggml.add_sep_token",
                        "true in a file without a separator token", "tokenizer.ggml.seperator_token_id");
        std::vector<llama_token> ids(text.size() / 2 + 16);
        const auto               tokenize = [&] {
            try {
                return llama_tokenize(vocab, text.data(), (int32_t) text.size(), ids.data(), (int32_t) ids.size(), add_special, parse_special);
            } catch (const std::exception & error) {
                throw bridge_error(join("text cannot be tokenised with the file's vocabulary, which lacks tokens that its kind must have (", error.what(), ")."));
            }
        };
        int32_t n = tokenize();
        if (n < 0) {
            PYGGTRAIN_CHECK(n != std::numeric_limits<int32_t>::min(), "text", "too long for llama.cpp", "less than 2^31 tokens");
            ids.resize((size_t) -n);
            n = tokenize();
        }
        PYGGTRAIN_CHECK(n >= 0, "text", "not tokenised by llama.cpp", "a stable token count");
        ids.resize((size_t) n);
        return ids;
    }

    std::string decode(const std::vector<int64_t> & ids, bool remove_special, bool unparse_special) const {
        std::vector<llama_token> tokens;
        tokens.reserve(ids.size());
        for (int64_t id : ids) {
            tokens.push_back(check_id(id));
        }
        std::string text(ids.size() * 8 + 16, '\0');
        const auto  detokenize = [&] {
            return llama_detokenize(vocab, tokens.data(), (int32_t) tokens.size(), text.data(), (int32_t) text.size(), remove_special, unparse_special);
        };
        int32_t n = detokenize();
        if (n < 0) {
            text.resize((size_t) -n);
            n = detokenize();
        }
        PYGGTRAIN_CHECK(n >= 0, "ids", "not decoded by llama.cpp", "a stable text length");
        text.resize((size_t) n);
        return text;
    }

    std::string piece(int64_t id, bool special) const {
        std::string text(64, '\0');
        int32_t     n = llama_token_to_piece(vocab, check_id(id), text.data(), (int32_t) text.size(), 0, special);
        if (n < 0) {
            text.resize((size_t) -n);
            n = llama_token_to_piece(vocab, (llama_token) id, text.data(), (int32_t) text.size(), 0, special);
        }
        text.resize((size_t) (n < 0 ? 0 : n));
        return text;
    }
};

void register_tokenizer(py::module_ & module) {
    using released = py::call_guard<py::gil_scoped_release>;
    py::class_<tokenizer>(module, "Tokenizer", "llama.cpp's tokenizer of one GGUF file; reads no weights. Ids that do not exist in the file are -1.")
        .def(py::init<const std::string &>(), py::arg("path"), released())
        .def_property_readonly("num_tokens", [](const tokenizer & self) { return llama_vocab_n_tokens(self.vocab); })
        .def_property_readonly("bos_id", [](const tokenizer & self) { return llama_vocab_bos(self.vocab); })
        .def_property_readonly("eos_id", [](const tokenizer & self) { return llama_vocab_eos(self.vocab); })
        .def_property_readonly("eot_id", [](const tokenizer & self) { return llama_vocab_eot(self.vocab); })
        .def_property_readonly("add_bos", [](const tokenizer & self) { return llama_vocab_get_add_bos(self.vocab); })
        .def_property_readonly("add_eos", [](const tokenizer & self) { return llama_vocab_get_add_eos(self.vocab); })
        .def("encode", &tokenizer::encode, py::arg("text"), py::arg("add_special"), py::arg("parse_special"), released(),
             "Ids of UTF-8 bytes. add_special adds BOS / EOS by the file's own rule; parse_special turns the text of control tokens into them.")
        .def("decode",
             [](const tokenizer & self, const std::vector<int64_t> & ids, bool remove_special, bool unparse_special) {
                 return py::bytes(self.decode(ids, remove_special, unparse_special));
             },
             py::arg("ids"), py::arg("remove_special"), py::arg("unparse_special"))
        .def("piece", [](const tokenizer & self, int64_t id, bool special) { return py::bytes(self.piece(id, special)); }, py::arg("id"), py::arg("special"))
        .def("is_end_of_generation", [](const tokenizer & self, int64_t id) { return llama_vocab_is_eog(self.vocab, self.check_id(id)); }, py::arg("id"))
        .def("is_control", [](const tokenizer & self, int64_t id) { return llama_vocab_is_control(self.vocab, self.check_id(id)); }, py::arg("id"));
}

} // namespace pyggtrain
