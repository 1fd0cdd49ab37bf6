// What the system does when a mapped file loses its end while it is in use: the next read there raises SIGBUS, which ends the
// process. No read can be undone in the middle of a product that many threads compute, so the process still ends; but it first
// says which file was cut off. A handler that somebody else set runs afterwards.
#pragma once

#include <cstdint>
#include <string>

namespace pyggtrain {

// Name `path` in the message if a read between data and data + size fails. Thread-safe; more than some hundred files at once are
// left out.
void bus_error_watch(const char * data, uint64_t size, const std::string & path);

void bus_error_forget(const char * data);

} // namespace pyggtrain
