// See common.h.
#pragma once

#include <cstdio>

#include "ggml.h"

#define LOG_LEVEL_DEBUG 5
#define LOG_LEVEL_ERROR 1
#define LOG(...)        std::printf(__VA_ARGS__)
#define LOG_INF(...)    std::fprintf(stderr, __VA_ARGS__)
#define LOG_ERR(...)    std::fprintf(stderr, __VA_ARGS__)

inline void common_log_set_verbosity_thold(int) {}
inline int  common_log_get_verbosity(ggml_log_level) { return 0; }
inline int  common_log_main() { return 0; }
inline void common_log_flush(int) {}
