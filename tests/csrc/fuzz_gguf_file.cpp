// Coverage-guided fuzzing of the GGUF parser: no input may crash it, hang it, or make it allocate out of proportion.
// Built and run by tests/csrc/fuzz_gguf_file.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "gguf_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    static const int         fd   = memfd_create("fuzz", 0);
    static const std::string path = "/proc/self/fd/" + std::to_string(fd);
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t) size) {
        abort();
    }
    try {
        const auto file = pyggtrain::gguf_file_open(path);
        // What Python would do next: decode every value and touch the first and last byte of every tensor.
        for (const auto & [key, value] : file->values) {
            pyggtrain::gguf_cursor c{ *file, value.offset };
            for (uint64_t i = 0; value.type == 8 && i < value.count; i++) {
                c.string("a string", UINT64_MAX);
            }
        }
        volatile char sink = 0;
        for (const auto & tensor : file->tensors) {
            sink = file->mapping->data[tensor.offset] ^ file->mapping->data[tensor.offset + tensor.num_bytes - 1];
        }
        (void) sink;
    } catch (const pyggtrain::gguf_error &) {
        // The one way in which a bad file may end.
    }
    return 0;
}
