// Preconditions of the bridge. ggml and llama.cpp abort the process on a broken precondition; here each one becomes a Python
// exception of pyggtrain.errors, so that no assertion can be reached from Python.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace pyggtrain {

// A call broke a precondition, or llama.cpp refused. -> pyggtrain.errors.BridgeError
struct bridge_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A file is not a readable GGUF file. -> pyggtrain.errors.GGUFError
struct gguf_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <typename... Parts> std::string join(const Parts &... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

} // namespace pyggtrain

// PYGGTRAIN_CHECK(ok, argument, found, needed): `found` and `needed` are parts of a sentence, evaluated only on failure.
#define PYGGTRAIN_CHECK(ok, argument, found, needed)                                                                            \
    do {                                                                                                                        \
        if (!(ok)) {                                                                                                            \
            throw ::pyggtrain::bridge_error(::pyggtrain::join(argument, " is ", found, "; needed: ", needed, "."));             \
        }                                                                                                                       \
    } while (0)
