#include "bus_error.h"

#include <atomic>
#include <csignal>
#include <cstring>
#include <mutex>

#include <unistd.h>

namespace pyggtrain {

static constexpr int MAX_WATCHED = 256;

// Read by a signal handler: no locks, no memory is freed. `end` is set last and cleared first.
struct watched_range {
    std::atomic<uintptr_t> begin{ 0 };
    std::atomic<uintptr_t> end{ 0 };
    char                   path[1024];
};

static watched_range    watched[MAX_WATCHED];
static std::mutex       watched_mutex;
static struct sigaction previous_action;

static void say(const char * text) {
    // Nothing can be done where the message cannot be written.
    (void) !::write(STDERR_FILENO, text, std::strlen(text));
}

static void on_bus_error(int, siginfo_t * info, void *) {
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    for (const watched_range & range : watched) {
        if (address < range.end.load() && address >= range.begin.load()) {
            say("\npyggtrain: ");
            say(range.path);
            say(": was cut off while it was in use, or its disk failed. The bytes are gone, so the process ends here.\n");
            break;
        }
    }
    // The read is tried again on return, and fails again: as if this handler had never been there.
    ::sigaction(SIGBUS, &previous_action, nullptr);
}

void bus_error_watch(const char * data, uint64_t size, const std::string & path) {
    std::lock_guard<std::mutex> lock(watched_mutex);
    static const bool           is_installed = [] {
        struct sigaction action = {};
        action.sa_sigaction     = on_bus_error;
        action.sa_flags         = SA_SIGINFO | SA_ONSTACK;
        ::sigemptyset(&action.sa_mask);
        return ::sigaction(SIGBUS, &action, &previous_action) == 0;
    }();
    if (!is_installed) {
        return;
    }
    for (watched_range & range : watched) {
        if (range.end.load() == 0) {
            std::strncpy(range.path, path.c_str(), sizeof(range.path) - 1);
            range.begin = reinterpret_cast<uintptr_t>(data);
            range.end   = reinterpret_cast<uintptr_t>(data) + size;
            return;
        }
    }
}

void bus_error_forget(const char * data) {
    std::lock_guard<std::mutex> lock(watched_mutex);
    for (watched_range & range : watched) {
        if (range.begin.load() == reinterpret_cast<uintptr_t>(data)) {
            range.end   = 0;
            range.begin = 0;
            return;
        }
    }
}

} // namespace pyggtrain
