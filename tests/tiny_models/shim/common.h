// What test-llama-archs.cpp takes from llama.cpp's `common` library. Only the parts that run are real: generate.cpp makes files and
// decodes nothing.
#pragma once

#include <string>
#include <vector>

#include "llama.h"

struct common_batch {
    explicit common_batch(llama_context *) {}
    void              add(llama_token, llama_pos, llama_seq_id, bool) {}
    void              clear() {}
    llama_batch_ext * get() { return nullptr; }
};

inline void common_init() {}
