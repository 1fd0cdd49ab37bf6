#include <pybind11/stl.h>

#include "bindings.h"
#include "check.h"
#include "gguf.h"
#include "gguf_file.h"
#include "quant.h"
#include "tensor_view.h"

namespace pyggtrain {

static py::object decode_string(const std::string & text, const gguf_file & file, const std::string & key) {
    PyObject * decoded = PyUnicode_DecodeUTF8(text.data(), (Py_ssize_t) text.size(), "strict");
    if (decoded == nullptr) {
        PyErr_Clear();
        throw gguf_error(join(file.path, ": the text of '", key, "' is not valid UTF-8."));
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
        default:                return decode_string(c.string("a string"), c.file, key);
    }
}

static const gguf_value & find_value(const gguf_file & file, const std::string & key) {
    const auto found = file.values.find(key);
    if (found == file.values.end()) {
        throw py::key_error(key);
    }
    return found->second;
}

// In Python a number of one byte takes an object and a pointer to it, and a character up to four bytes. A value may not take more
// than twice the file and some room; the largest vocabularies (a million tokens) are far below.
static void check_decoded_size(const gguf_cursor & c, const gguf_value & value, const std::string & key) {
    constexpr uint64_t WIDEST_CHARACTER = 4, OBJECT_BYTES = 48, ROOM = (uint64_t) 64 << 20;
    if (WIDEST_CHARACTER * value.num_bytes + OBJECT_BYTES * value.count > 2 * c.file.mapping->size + ROOM) {
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
        .def("tensor_bytes", &tensor_bytes, py::arg("index"), "uint8 view of a tensor's blocks, shape [..., rows, row_bytes], at its own address in the mapping.");
    module.def("num_live_mappings", [] { return num_live_mappings(); }, "Files still mapped by this process, for tests of lifetime.");
}

} // namespace pyggtrain
