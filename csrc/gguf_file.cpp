#include "gguf_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <unordered_set>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bus_error.h"
#include "check.h"
#include "gguf.h"
#include "quant.h"

namespace pyggtrain {

// llama.cpp refuses longer tensor names (GGML_MAX_NAME counts the final NUL) and more dimensions.
static constexpr uint64_t MAX_TENSOR_NAME = GGML_MAX_NAME - 1;
static constexpr uint32_t MAX_DIMS        = GGML_MAX_DIMS;
static constexpr uint64_t HEADER_BYTES    = 24;

// Far above any real model (the largest have some thousand tensors). A key takes 14 bytes in the file and some 200 in memory, so
// without a limit a file of nothing but keys would take many times its own size.
static constexpr uint64_t MAX_KEYS    = 1 << 16;
static constexpr uint64_t MAX_TENSORS = 1 << 16;
// The specification's limit of a key, and all keys together: each is held several times. Real files have some thousand bytes of keys.
static constexpr uint64_t MAX_KEY_BYTES     = (1 << 16) - 1;
static constexpr uint64_t MAX_ALL_KEY_BYTES = 4 << 20;
// Sizes and offsets beyond this are in no file; sums of a few of them stay far from the end of 64 bits.
static constexpr uint64_t MAX_DATA_BYTES = (uint64_t) 1 << 60;
// Bytes read at a time where a file cannot be mapped.
static constexpr uint64_t READ_BYTES = 1 << 20;

static std::atomic<int> live_mappings{ 0 };

file_mapping::file_mapping(const std::string & path, bool use_mmap) : path(path) {
    // Nonblocking: opening a pipe would otherwise wait for somebody who writes to it.
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        throw gguf_error(join(path, ": cannot be opened: ", std::strerror(errno), "."));
    }
    try {
        struct stat status;
        if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
            throw gguf_error(join(path, ": is not a regular file; needed: a GGUF file."));
        }
        size        = (uint64_t) status.st_size;
        device      = (uint64_t) status.st_dev;
        inode       = (uint64_t) status.st_ino;
        modified_s  = status.st_mtim.tv_sec;
        modified_ns = status.st_mtim.tv_nsec;
        if (size < HEADER_BYTES) {
            throw gguf_error(join(path, ": has ", size, " bytes, less than a GGUF header (", HEADER_BYTES, " bytes). Download it again."));
        }
        why_read = use_mmap ? "" : "mapping is switched off";
        map(fd);
    } catch (...) {
        ::close(fd);
        throw;
    }
    if (why_read.empty()) {
        ::close(fd);
        fd = -1;
        bus_error_watch(data, size, path);
    }
    live_mappings++;
}

void file_mapping::map(int fd) {
    if (why_read.empty()) {
        // NORESERVE: a private writable mapping of a file larger than memory would otherwise be refused, though nothing is ever written.
        void * address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
        if (address != MAP_FAILED) {
            data       = static_cast<char *>(address);
            num_loaded = size;
            return;
        }
        if (errno == ENOMEM) {
            throw gguf_error(join(path, ": cannot be mapped into memory: ", std::strerror(errno), "."));
        }
        why_read = std::strerror(errno);
    }
    void * address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
        throw gguf_error(join(path, ": cannot be mapped (", why_read, "), and its ", size, " bytes do not fit into memory. Copy it to a local disk."));
    }
    data = static_cast<char *>(address);
}

void file_mapping::read_until(uint64_t end) {
    std::lock_guard<std::mutex> lock(mutex);
    uint64_t                    at = num_loaded.load();
    // A little ahead, so that a header of many small values takes few calls.
    end = std::min(size, (end + READ_BYTES - 1) / READ_BYTES * READ_BYTES);
    while (at < end) {
        const ssize_t n = ::pread(fd, data + at, (size_t) std::min(end - at, READ_BYTES), (off_t) at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            throw gguf_error(join(path, ": cannot be read at byte ", at, ": ", n < 0 ? std::strerror(errno) : "it has become shorter", "."));
        }
        at += (uint64_t) n;
    }
    num_loaded.store(at, std::memory_order_release);
}

void file_mapping::check_unchanged() const {
    struct stat status;
    // A file that was replaced or deleted lives on in the mapping, unchanged.
    if (::stat(path.c_str(), &status) != 0 || (uint64_t) status.st_dev != device || (uint64_t) status.st_ino != inode) {
        return;
    }
    if ((uint64_t) status.st_size != size) {
        throw gguf_error(join(path, ": had ", size, " bytes when it was opened and has ", status.st_size,
                              " now. Something writes to it while it is in use; start again once that is done."));
    }
    if (status.st_mtim.tv_sec != modified_s || status.st_mtim.tv_nsec != modified_ns) {
        throw gguf_error(join(path, ": was written to while it was in use, so weights may have changed. Start again once that is done."));
    }
}

file_mapping::~file_mapping() {
    if (data == nullptr) {
        return;
    }
    if (fd >= 0) {
        ::close(fd);
    } else {
        bus_error_forget(data);
    }
    ::munmap(data, size);
    live_mappings--;
}

int num_live_mappings() {
    return live_mappings.load();
}

static uint64_t scalar_bytes(uint32_t type) {
    switch (type) {
        case GGUF_TYPE_UINT8: case GGUF_TYPE_INT8: case GGUF_TYPE_BOOL: return 1;
        case GGUF_TYPE_UINT16: case GGUF_TYPE_INT16: return 2;
        case GGUF_TYPE_UINT32: case GGUF_TYPE_INT32: case GGUF_TYPE_FLOAT32: return 4;
        case GGUF_TYPE_UINT64: case GGUF_TYPE_INT64: case GGUF_TYPE_FLOAT64: return 8;
        default: return 0;
    }
}

const char * value_type_name(uint32_t type) {
    return type < GGUF_TYPE_COUNT ? gguf_type_name((gguf_type) type) : "unknown";
}

// Names reach Python, terminals and messages, so they must be text. RFC 3629: no overlong forms, no surrogates, at most 10FFFF.
static bool is_utf8(const std::string & text) {
    const auto byte         = [&](size_t i) { return i < text.size() ? (uint8_t) text[i] : (uint8_t) 0; };
    const auto is_following = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
    for (size_t i = 0; i < text.size();) {
        const uint8_t first = byte(i), second = byte(i + 1);
        if (first < 0x80) {
            i += 1;
        } else if (first >= 0xC2 && first <= 0xDF && is_following(i + 1)) {
            i += 2;
        } else if ((first & 0xF0) == 0xE0 && is_following(i + 1) && is_following(i + 2) && !(first == 0xE0 && second < 0xA0) &&
                   !(first == 0xED && second > 0x9F)) {
            i += 3;
        } else if (first >= 0xF0 && first <= 0xF4 && is_following(i + 1) && is_following(i + 2) && is_following(i + 3) &&
                   !(first == 0xF0 && second < 0x90) && !(first == 0xF4 && second > 0x8F)) {
            i += 4;
        } else {
            return false;
        }
    }
    return true;
}

static bool is_identifier(const std::string & text) {
    return !text.empty() && text.find('\0') == std::string::npos && is_utf8(text);
}

static void read_magic(gguf_cursor & c) {
    c.need(HEADER_BYTES, "the header");
    const char * bytes = c.file.mapping->data;
    if (std::memcmp(bytes, "GGUF", 4) != 0) {
        const std::string start(bytes, 16);
        const char *      hint = "";
        if (start.rfind("version https://", 0) == 0) {
            hint = " It is a Git LFS pointer, not the file itself: fetch the real one with 'git lfs pull'.";
        } else if (start.find("<!DOCTYPE") != std::string::npos || start.find("<html") != std::string::npos || start.find("<HTML") != std::string::npos) {
            hint = " It is a web page, probably the error page of a failed download.";
        } else if (start.rfind("PK", 0) == 0) {
            hint = " It is a zip archive: unpack it first.";
        }
        c.fail(join("does not begin with the letters GGUF, so this is not a GGUF file.", hint));
    }
    c.at = 4;
}

static void read_header(gguf_cursor & c, gguf_file & file, uint64_t & num_tensors, uint64_t & num_keys) {
    read_magic(c);
    file.version = c.number<uint32_t>("the version");
    if ((file.version & 0xFFFF) == 0) {
        c.fail("the version reads as a big-endian number. This is a big-endian GGUF file; needed: a little-endian one. Convert it with gguf-convert-endian.");
    }
    if (file.version < 2 || file.version > GGUF_VERSION) {
        c.fail(join("is GGUF version ", file.version, "; needed: 2 to ", GGUF_VERSION, "."));
    }
    num_tensors = c.number<uint64_t>("the tensor count");
    num_keys    = c.number<uint64_t>("the key count");
    // The smallest key takes 8 + 1 + 4 + 1 bytes and the smallest table entry 8 + 1 + 4 + 8 + 4 + 8.
    if (num_keys > c.left() / 14) {
        c.fail(join("the file says it has ", num_keys, " metadata keys, more than its size has room for: it is damaged, or cut off."));
    }
    if (num_tensors > c.left() / 33) {
        c.fail(join("the file says it has ", num_tensors, " tensors, more than its size has room for: it is damaged, or cut off."));
    }
    if (num_keys > MAX_KEYS || num_tensors > MAX_TENSORS) {
        c.fail(join("the file says it has ", num_keys, " metadata keys and ", num_tensors, " tensors; taken are at most ", MAX_KEYS, " of each."));
    }
}

// `room`: bytes that this key and those after it may take.
static void read_key(gguf_cursor & c, gguf_file & file, uint64_t & room) {
    const std::string key = c.string("a metadata key", MAX_KEY_BYTES);
    if (!is_identifier(key)) {
        c.fail("a metadata key is empty, holds a NUL byte, or is not UTF-8.");
    }
    if (key.size() > room) {
        c.fail(join("the metadata keys take more than ", MAX_ALL_KEY_BYTES, " bytes together."));
    }
    room -= key.size();
    gguf_value value{ c.number<uint32_t>("the type of a metadata value"), false, 1, 0, 0 };
    if (value.type == GGUF_TYPE_ARRAY) {
        value.is_array = true;
        value.type     = c.number<uint32_t>("the element type of an array");
        value.count    = c.number<uint64_t>("the length of an array");
    }
    value.offset = c.at;
    if (value.type == GGUF_TYPE_STRING) {
        if (value.count > c.left() / 8) {
            c.fail(join("the array '", key, "' says it has ", value.count, " strings, more than the file has room for."));
        }
        for (uint64_t i = 0; i < value.count; i++) {
            c.skip(c.number<uint64_t>("a string's length"), "a string");
        }
    } else {
        const uint64_t size = scalar_bytes(value.type);
        if (size == 0) {
            c.fail(join("'", key, "' has value type ", value.type, " (", value_type_name(value.type), "), which is not allowed here."));
        }
        if (value.count > c.left() / size) {
            c.fail(join("'", key, "' says it has ", value.count, " values, more than the file has room for."));
        }
        c.need(value.count * size, "a value");
        if (value.type == GGUF_TYPE_BOOL) {
            for (uint64_t i = 0; i < value.count; i++) {
                if ((uint8_t) file.mapping->data[c.at + i] > 1) {
                    c.fail(join("'", key, "' holds a boolean that is neither 0 nor 1."));
                }
            }
        }
        c.at += value.count * size;
    }
    value.num_bytes = c.at - value.offset;
    if (!file.values.emplace(key, value).second) {
        c.fail(join("the metadata key '", key, "' stands twice."));
    }
    file.keys.push_back(key);
}

static void read_alignment(gguf_cursor & c, gguf_file & file) {
    file.alignment   = GGUF_DEFAULT_ALIGNMENT;
    const auto found = file.values.find(GGUF_KEY_GENERAL_ALIGNMENT);
    if (found == file.values.end()) {
        return;
    }
    const gguf_value & value = found->second;
    if (value.type != GGUF_TYPE_UINT32 || value.is_array) {
        c.fail(join("'" GGUF_KEY_GENERAL_ALIGNMENT "' is ", value_type_name(value.type), "; needed: u32."));
    }
    uint32_t alignment;
    std::memcpy(&alignment, file.mapping->data + value.offset, sizeof(alignment));
    // llama.cpp reads any power of two but aborts where it maps a file whose tensors do not start at its own boundaries of 32 bytes.
    if (alignment < GGUF_DEFAULT_ALIGNMENT || (alignment & (alignment - 1)) != 0) {
        c.fail(join("'" GGUF_KEY_GENERAL_ALIGNMENT "' is ", alignment, "; needed: a power of two, ", GGUF_DEFAULT_ALIGNMENT, " or more."));
    }
    file.alignment = alignment;
}

// The product of two sizes, or an error where it does not fit: a crafted file may not wrap around to a small number.
static uint64_t multiply(const gguf_cursor & c, uint64_t a, uint64_t b, const std::string & name) {
    if (b != 0 && a > (uint64_t) std::numeric_limits<int64_t>::max() / b) {
        c.fail(join("the sizes of tensor '", name, "' multiply to more than 2^63."));
    }
    return a * b;
}

// `unknown` collects tensors whose type this build does not know, so that all of them are named at once.
static void read_tensor(gguf_cursor & c, gguf_file & file, std::unordered_set<std::string> & names, std::vector<std::string> & unknown) {
    gguf_tensor tensor;
    tensor.name = c.string("a tensor's name", MAX_TENSOR_NAME);
    if (!is_identifier(tensor.name)) {
        c.fail("a tensor's name is empty, holds a NUL byte, or is not UTF-8.");
    }
    if (!names.insert(tensor.name).second) {
        c.fail(join("the tensor '", tensor.name, "' stands twice."));
    }
    const uint32_t num_dims = c.number<uint32_t>("a tensor's dimension count");
    if (num_dims < 1 || num_dims > MAX_DIMS) {
        c.fail(join("tensor '", tensor.name, "' has ", num_dims, " dimensions; needed: 1 to ", MAX_DIMS, "."));
    }
    uint64_t num_elements = 1;
    tensor.shape.resize(num_dims);
    for (uint32_t i = 0; i < num_dims; i++) {
        const uint64_t size = c.number<uint64_t>("a tensor's size");
        if (size == 0) {
            c.fail(join("tensor '", tensor.name, "' has a dimension of size 0."));
        }
        num_elements                   = multiply(c, num_elements, size, tensor.name);
        tensor.shape[num_dims - 1 - i] = (int64_t) size;
    }
    const uint32_t           type_id = c.number<uint32_t>("a tensor's type");
    const ggml_type_traits * traits  = quant_traits_or_null(type_id);
    if (traits == nullptr) {
        unknown.push_back(join("'", tensor.name, "' (", type_id, ")"));
        c.skip(sizeof(uint64_t), "a tensor's offset");
        return;
    }
    tensor.type = (ggml_type) type_id;
    if (tensor.shape.back() % traits->blck_size != 0) {
        c.fail(join("tensor '", tensor.name, "' has rows of ", tensor.shape.back(), " values; ", traits->type_name, " needs a multiple of ", traits->blck_size, "."));
    }
    tensor.num_bytes = multiply(c, num_elements / (uint64_t) traits->blck_size, traits->type_size, tensor.name);
    // Relative to the start of the data until place_tensors() has found that start.
    tensor.offset = c.number<uint64_t>("a tensor's offset");
    file.tensors.push_back(std::move(tensor));
}

static void check_types(const gguf_cursor & c, const std::vector<std::string> & unknown) {
    if (unknown.empty()) {
        return;
    }
    constexpr size_t MAX_NAMED = 10;
    std::string      list;
    for (size_t i = 0; i < std::min(unknown.size(), MAX_NAMED); i++) {
        list += (i ? ", " : "") + unknown[i];
    }
    c.fail(join(unknown.size(), " tensors have ggml type numbers that this build of llama.cpp does not know: ", list,
                unknown.size() > MAX_NAMED ? ", ..." : "", ". Take the model in another quantisation."));
}

// Tensors stand one after another in the order of the table, each padded to the alignment (llama.cpp's rule), and end inside the file.
static void place_tensors(gguf_cursor & c, gguf_file & file) {
    const auto pad = [&](uint64_t n) { return (n + file.alignment - 1) / file.alignment * file.alignment; };
    file.data_offset = pad(c.at);
    const uint64_t file_bytes = file.mapping->size;
    uint64_t       expected = 0, end = c.at;
    for (gguf_tensor & tensor : file.tensors) {
        if (tensor.offset != expected) {
            c.fail(join("tensor '", tensor.name, "' has offset ", tensor.offset, " in the data; needed: ", expected, ", right after the tensor before it."));
        }
        if (tensor.num_bytes > MAX_DATA_BYTES || expected > MAX_DATA_BYTES) {
            c.fail(join("tensor '", tensor.name, "' of ", tensor.num_bytes, " bytes at offset ", expected, " in the data does not fit into any file: it is cut off or damaged."));
        }
        expected += pad(tensor.num_bytes);
        tensor.offset += file.data_offset;
        end = tensor.offset + tensor.num_bytes;
    }
    if (end > file_bytes) {
        throw gguf_error(join(file.path, ": has ", file_bytes, " bytes, but its ", file.tensors.size(), " tensors end at byte ", end,
                              ". The file is cut off: download it again, or compare its size with the source."));
    }
}

std::shared_ptr<gguf_file> gguf_file_open(const std::string & path, bool use_mmap) {
    auto file     = std::make_shared<gguf_file>();
    file->path    = path;
    file->mapping = std::make_shared<file_mapping>(path, use_mmap);
    gguf_cursor c{ *file, 0 };
    uint64_t num_tensors, num_keys;
    read_header(c, *file, num_tensors, num_keys);
    for (uint64_t i = 0, room = MAX_ALL_KEY_BYTES; i < num_keys; i++) {
        read_key(c, *file, room);
    }
    read_alignment(c, *file);
    std::unordered_set<std::string> names;
    std::vector<std::string>        unknown;
    for (uint64_t i = 0; i < num_tensors; i++) {
        read_tensor(c, *file, names, unknown);
    }
    check_types(c, unknown);
    place_tensors(c, *file);
    return file;
}

} // namespace pyggtrain
