#include <algorithm>

#include <pybind11/stl.h>

#include "bindings.h"
#include "check.h"
#include "gguf.h"
#include "gguf_file.h"
#include "quant.h"
#include "tensor_view.h"

namespace pyggtrain {

static py::object read_string(gguf_cursor & c, const std::string & key) {
    const uint64_t length  = c.number<uint64_t>("a string");
    PyObject *     decoded = PyUnicode_DecodeUTF8(c.skip(length, "a string"), (Py_ssize_t) length, "strict");
    if (decoded == nullptr) {
        PyErr_Clear();
        throw gguf_error(join(c.file.path, ": the text of '", key, "' is not valid UTF-8."));
    }
    return py::reinterpret_steal<py::object>(decoded);
}

static py::object read_scalar(gguf_cursor & c, uint32_t type, const std::string & key) {
    switch (type) {
        case GGUF_TYPE_UINT8:   return py::int_(c.number<uint8_t>("a value"));
        case GGUF_TYPE_INT8:    return py::int_(c.number<int8_t>("a value"));
        case GGUF_TYPE_UINT16:  return py::int_(c.number<uint16_t>("a value"));
        case GGUF_TYPE_INT16:   return py::int_(c.number<int16_t>("a value"));
        case GGUF_TYPE_UINT32:  return py::int_(c.number<uint32_t>("a value"));
        case GGUF_TYPE_INT32:   return py::int_(c.number<int32_t>("a value"));
        case GGUF_TYPE_UINT64:  return py::int_(c.number<uint64_t>("a value"));
        case GGUF_TYPE_INT64:   return py::int_(c.number<int64_t>("a value"));
        case GGUF_TYPE_FLOAT32: return py::float_(c.number<float>("a value"));
        case GGUF_TYPE_FLOAT64: return py::float_(c.number<double>("a value"));
        case GGUF_TYPE_BOOL:    return py::bool_(c.number<uint8_t>("a value") != 0);
        default:                return read_string(c, key);
    }
}

static const gguf_value & find_value(const gguf_file & file, const std::string & key) {
    const auto found = file.values.find(key);
    if (found == file.values.end()) {
        throw py::key_error(key);
    }
    return found->second;
}

// Bytes that a value takes in Python at most, also while it is being decoded. A number takes an object and a pointer to it. A text
// takes 1, 2 or 4 bytes for each character, as its widest one needs, and half as much again while it is widened.
static uint64_t decoded_bytes(const gguf_file & file, const gguf_value & value) {
    constexpr uint64_t OBJECT_BYTES = 48, TEXT_BYTES = 80;
    if (value.type != GGUF_TYPE_STRING) {
        return OBJECT_BYTES * value.count;
    }
    gguf_cursor c{ file, value.offset };
    uint64_t    total = 0, longest = 0;
    for (uint64_t i = 0; i < value.count; i++) {
        const uint64_t length = c.number<uint64_t>("a string");
        const auto *   bytes  = reinterpret_cast<const uint8_t *>(c.skip(length, "a string"));
        uint8_t        widest = 0;
        for (uint64_t k = 0; k < length; k++) {
            widest = std::max(widest, bytes[k]);
        }
        // First bytes of sequences: from F0 on beyond 2 bytes a character, from C4 on beyond Latin-1.
        const uint64_t needed = length * (widest >= 0xF0 ? 4 : widest >= 0xC4 ? 2 : 1);
        total += TEXT_BYTES + needed;
        longest = std::max(longest, needed);
    }
    return total + longest / 2;
}

// No file may take more than twice its size and 64 MiB, so that no value may take more than half of that: it is often copied, to be
// hashed say. The largest vocabularies (a million tokens) are below in the files that have them.
static void check_decoded_size(const gguf_cursor & c, const gguf_value & value, const std::string & key) {
    constexpr uint64_t ROOM = (uint64_t) 32 << 20;
    if (decoded_bytes(c.file, value) > c.file.mapping->size + ROOM) {
        c.fail(join("'", key, "' has ", value.count, " values in ", value.num_bytes, " bytes, which would take many times the size of the file to decode."));
    }
}

static py::object read_value(const gguf_file & file, const std::string & key) {
    const gguf_value & value = find_value(file, key);
    gguf_cursor        c{ file, value.offset };
    check_decoded_size(c, value, key);
    if (!value.is_array) {
        return read_scalar(c, value.type, key);
    }
    py::list list(value.count);
    for (uint64_t i = 0; i < value.count; i++) {
        list[i] = read_scalar(c, value.type, key);
    }
    return list;
}

static py::bytes read_bytes(const gguf_file & file, uint64_t offset, uint64_t num_bytes) {
    PYGGTRAIN_CHECK(offset <= file.mapping->size && num_bytes <= file.mapping->size - offset, "range", join(num_bytes, " bytes from ", offset),
                    join("within the file's ", file.mapping->size, " bytes"));
    file.mapping->load(offset + num_bytes);
    return py::bytes(file.mapping->data + offset, num_bytes);
}

static tensor_view tensor_bytes(const gguf_file & file, size_t index) {
    if (index >= file.tensors.size()) {
        throw py::index_error();
    }
    const gguf_tensor &  tensor = file.tensors[index];
    std::vector<int64_t> shape  = tensor.shape;
    shape.back()                = (int64_t) ggml_row_size(tensor.type, shape.back());
    file.mapping->load(tensor.offset + tensor.num_bytes);
    return { file.mapping, file.mapping->data + tensor.offset, shape, dtype::u8 };
}

void register_gguf_file(py::module_ & module) {
    py::class_<gguf_tensor>(module, "TensorInfo", "One row of a file's tensor table; shape in torch order, offset in bytes from the start of the file.")
        .def_readonly("name", &gguf_tensor::name)
        .def_property_readonly("type", [](const gguf_tensor & self) { return quant_type_name(self.type); })
        .def_property_readonly("shape", [](const gguf_tensor & self) { return py::tuple(py::cast(self.shape)); })
        .def_readonly("offset", &gguf_tensor::offset)
        .def_readonly("num_bytes", &gguf_tensor::num_bytes);
    py::class_<gguf_file, std::shared_ptr<gguf_file>>(module, "MappedGGUF", "One GGUF file, mapped copy-on-write and parsed; metadata values are decoded when asked for.")
        .def(py::init(&gguf_file_open), py::arg("path"), py::arg("use_mmap") = true, py::call_guard<py::gil_scoped_release>())
        .def_readonly("path", &gguf_file::path)
        .def_readonly("version", &gguf_file::version)
        .def_readonly("alignment", &gguf_file::alignment)
        .def_readonly("data_offset", &gguf_file::data_offset)
        .def_readonly("tensors", &gguf_file::tensors)
        .def_property_readonly("file_bytes", [](const gguf_file & self) { return self.mapping->size; })
        .def_property_readonly("why_read", [](const gguf_file & self) { return self.mapping->why_read; })
        .def("check_unchanged", [](const gguf_file & self) { self.mapping->check_unchanged(); },
             "GGUFError if the file has been cut off or written to since it was opened.")
        .def("keys", [](const gguf_file & self) { return self.keys; })
        .def("value_type", [](const gguf_file & self, const std::string & key) {
                 const gguf_value & value = find_value(self, key);
                 return join(value.is_array ? "arr[" : "", value_type_name(value.type), value.is_array ? "]" : "");
             }, py::arg("key"), "'u32', 'str', 'arr[f32]', ...; KeyError if absent.")
        .def("value_count", [](const gguf_file & self, const std::string & key) { return find_value(self, key).count; }, py::arg("key"),
             "Values in an array, 1 for a scalar; KeyError if absent.")
        .def("value", &read_value, py::arg("key"), "The value as a Python scalar or list; KeyError if absent.")
        .def("decoded_bytes", [](const gguf_file & self, const std::string & key) { return decoded_bytes(self, find_value(self, key)); }, py::arg("key"),
             "Bytes of memory that `value` takes at most; KeyError if absent.")
        .def("read_bytes", &read_bytes, py::arg("offset"), py::arg("num_bytes"), "A copy of some of the bytes that were opened, whatever lies under the path now.")
        .def("tensor_bytes", &tensor_bytes, py::arg("index"), "uint8 view of a tensor's blocks, shape [..., rows, row_bytes], at its own address in the mapping.");
    module.def("num_live_mappings", [] { return num_live_mappings(); }, "Files still mapped by this process, for tests of lifetime.");
}

} // namespace pyggtrain
