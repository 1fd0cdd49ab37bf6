// What test-llama-archs.cpp takes from llama.cpp's `common` library, as common.h and log.h. Only the parts that run are real:
// generate.cpp makes files and decodes nothing.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "ggml.h"
#include "llama.h"

struct common_batch {
    explicit common_batch(llama_context *) {}
    void              add(llama_token, llama_pos, llama_seq_id, bool) {}
    void              clear() {}
    llama_batch_ext * get() { return nullptr; }
};

inline void common_init() {}

#define LOG_LEVEL_DEBUG 5
#define LOG_LEVEL_ERROR 1
#define LOG(...)        std::printf(__VA_ARGS__)
#define LOG_INF(...)    std::fprintf(stderr, __VA_ARGS__)
#define LOG_ERR(...)    std::fprintf(stderr, __VA_ARGS__)

inline void common_log_set_verbosity_thold(int) {}
inline int  common_log_get_verbosity(ggml_log_level) { return 0; }
inline int  common_log_main() { return 0; }
inline void common_log_flush(int) {}
