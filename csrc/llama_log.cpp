#include "llama_log.h"

#include <deque>
#include <mutex>

#include "llama.h"

namespace pyggtrain {

static constexpr size_t MAX_LINES = 12;

static std::mutex              log_mutex;
static std::deque<std::string> log_lines;

// Long messages arrive in pieces: GGML_LOG_LEVEL_CONT continues the line before it, at that line's level.
static void remember(ggml_log_level level, const char * text, void *) {
    static bool                 last_kept = false;
    std::lock_guard<std::mutex> lock(log_mutex);
    if (level == GGML_LOG_LEVEL_CONT) {
        if (last_kept && !log_lines.empty()) {
            log_lines.back() += text;
        }
        return;
    }
    last_kept = level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN;
    if (last_kept) {
        log_lines.emplace_back(text);
        if (log_lines.size() > MAX_LINES) {
            log_lines.pop_front();
        }
    }
}

void llama_start() {
    llama_log_set(remember, nullptr);
    llama_backend_init();
}

void llama_log_clear() {
    std::lock_guard<std::mutex> lock(log_mutex);
    log_lines.clear();
}

std::string llama_log_complaints() {
    std::lock_guard<std::mutex> lock(log_mutex);
    std::string                 text;
    for (const std::string & line : log_lines) {
        text += line;
    }
    while (!text.empty() && text.back() == '\n') {
        text.pop_back();
    }
    return text.empty() ? "no reason given" : text;
}

} // namespace pyggtrain
