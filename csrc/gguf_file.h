// One GGUF file, mapped and parsed.
//
// Layout (little-endian): magic "GGUF" | version u32 | tensor count u64 | key count u64 | keys | tensor table | padding | data.
//   key          name (u64 length + bytes) | type u32 | value; an array is type 9 | element type u32 | count u64 | elements
//   table entry  name | dimension count u32 | sizes u64 each, fastest first | ggml type u32 | offset u64 from the start of the data
//
// Everything is read out of the mapping through a cursor that knows the end of the file, so no count, length or offset in the
// file can make this code read outside it, allocate more than the file could hold, or abort. Each broken rule is a gguf_error
// that names the file, the byte and the rule. The rules are llama.cpp's own, so that a file accepted here loads there.
//
// The mapping is private (copy on write): a stray write through a tensor view changes neither the file nor anyone else's view,
// and cannot crash. It is unmapped when the file object and all tensors made from it are gone. Threads may read concurrently.
// Where the file system cannot map, bytes are read into memory instead, from the start of the file to the last byte asked for.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "ggml.h"

namespace pyggtrain {

// The file's bytes, copy on write. Lives as long as somebody holds it.
struct file_mapping {
    std::string path;
    char *      data = nullptr;
    uint64_t    size = 0;
    // Why the file is read into memory instead of being mapped; empty if it is mapped.
    std::string why_read;

    file_mapping(const std::string & path, bool use_mmap);
    ~file_mapping();
    file_mapping(const file_mapping &)             = delete;
    file_mapping & operator=(const file_mapping &) = delete;

    // Make the bytes before `end` readable through `data`. Does nothing for a mapped file.
    void load(uint64_t end) {
        if (end > num_loaded.load(std::memory_order_acquire)) {
            read_until(end);
        }
    }

    // gguf_error if the file under `path` is still the one that was opened, and has been cut off or written to since.
    void check_unchanged() const;

  private:
    void map(int fd);
    void read_until(uint64_t end);

    int                   fd = -1;      // kept open only to read from
    std::atomic<uint64_t> num_loaded{ 0 };
    std::mutex            mutex;
    uint64_t              device = 0, inode = 0;
    int64_t               modified_s = 0, modified_ns = 0;
};

// Files still mapped by this process.
int num_live_mappings();

struct gguf_value {
    uint32_t type;          // GGUF type number of the value, or of an array's elements
    bool     is_array;
    uint64_t count;         // 1 for a scalar
    uint64_t offset;        // of the value's first byte in the file
    uint64_t num_bytes;     // of the value in the file
};

struct gguf_tensor {
    std::string          name;
    ggml_type            type;
    std::vector<int64_t> shape;      // torch order
    uint64_t             offset;     // of the first byte in the file
    uint64_t             num_bytes;
};

struct gguf_file {
    std::string                                 path;
    std::shared_ptr<file_mapping>               mapping;
    uint32_t                                    version;
    uint64_t                                    alignment;
    uint64_t                                    data_offset;
    std::vector<std::string>                    keys;
    std::unordered_map<std::string, gguf_value> values;
    std::vector<gguf_tensor>                    tensors;
};

// `use_mmap` false reads instead of mapping, as on a file system that cannot map.
std::shared_ptr<gguf_file> gguf_file_open(const std::string & path, bool use_mmap = true);

// GGUF's name of a value type: "u32", "str", ...
const char * value_type_name(uint32_t type);

// Reads forward through the mapping and never past its end.
struct gguf_cursor {
    const gguf_file & file;
    uint64_t          at;

    uint64_t left() const { return file.mapping->size - at; }

    [[noreturn]] void fail(const std::string & rule) const { throw gguf_error(join(file.path, ": byte ", at, ": ", rule)); }

    void need(uint64_t num_bytes, const char * what) const {
        if (num_bytes > left()) {
            fail(join(what, " needs ", num_bytes, " bytes but the file ends after ", left(), ". The download is not complete."));
        }
        file.mapping->load(at + num_bytes);
    }

    template <typename T> T number(const char * what) {
        need(sizeof(T), what);
        T value;
        std::memcpy(&value, file.mapping->data + at, sizeof(T));
        at += sizeof(T);
        return value;
    }

    std::string string(const char * what, uint64_t max_bytes) {
        const uint64_t length = number<uint64_t>(what);
        need(length, what);
        if (length > max_bytes) {
            fail(join(what, " is ", length, " bytes long, longer than ", max_bytes, " bytes."));
        }
        std::string text(file.mapping->data + at, length);
        at += length;
        return text;
    }

    // Goes over `num_bytes` and returns where they begin.
    const char * skip(uint64_t num_bytes, const char * what) {
        need(num_bytes, what);
        at += num_bytes;
        return file.mapping->data + at - num_bytes;
    }
};

} // namespace pyggtrain
