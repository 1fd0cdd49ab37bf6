// See matmul_cuda.h. The second half of this file stands in for ggml-cuda.cu: the few functions that MMQ expects from the backend that it
// usually lives in.
#include "matmul_cuda.h"

#include <algorithm>
#include <memory>

#include "check.h"
#include "ggml-backend-impl.h"
#include "ggml-cuda/common.cuh"
#include "ggml-cuda/mmq.cuh"
#include "quant.h"

namespace pyggtrain {

// MMQ walks over K in steps of this many weights. Where the last step is not full it reads beyond the end of the last row.
static constexpr int64_t K_STEP = 256;

// Allocations are rounded up to this, so that every buffer in the workspace is aligned for any load.
static constexpr size_t ALIGNMENT = 256;

// A stack over the caller's workspace; ggml frees in the reverse order.
struct workspace_pool : ggml_cuda_pool {
    char * base;
    size_t capacity;
    size_t used = 0;

    workspace_pool(void * base, size_t capacity) : base((char *) base), capacity(capacity) {}

    void * alloc(size_t size, size_t * actual_size) override {
        *actual_size = GGML_PAD(size, ALIGNMENT);
        PYGGTRAIN_CHECK(used + *actual_size <= capacity, "workspace", join(capacity, " bytes"), join("at least ", used + *actual_size, " bytes"));
        void * place = base + used;
        used += *actual_size;
        return place;
    }

    void free(void *, size_t size) override { used -= size; }
};

// Makes a device current for the length of a call.
struct device_guard {
    int previous = 0;

    explicit device_guard(int device) {
        const int count = ggml_cuda_info().device_count;
        PYGGTRAIN_CHECK(device >= 0 && device < count, "device", device, join("0 to ", count - 1));
        CUDA_CHECK(cudaGetDevice(&previous));
        if (previous != device) {
            CUDA_CHECK(cudaSetDevice(device));
        }
    }

    ~device_guard() { cudaSetDevice(previous); }
};

std::string mmq_architectures() { return PYGGTRAIN_CUDA_ARCHITECTURES; }

std::vector<ggml_type> mmq_types() {
    return {
        GGML_TYPE_Q1_0, GGML_TYPE_Q2_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0,
        GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K,
        GGML_TYPE_IQ1_S, GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_S, GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ3_S, GGML_TYPE_IQ4_XS, GGML_TYPE_IQ4_NL,
        GGML_TYPE_MXFP4, GGML_TYPE_NVFP4,
    };
}

// Does nothing; whether it can be loaded tells whether this build has code for the card.
static __global__ void probe_kernel() {}

static void check_card(int device) {
    cudaFuncAttributes attributes;
    const cudaError_t  status = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (status != cudaSuccess) {
        // Forget the error: it would be reported by whatever torch launches next.
        (void) cudaGetLastError();
        const int cc = ggml_cuda_info().devices[device].cc;
        throw bridge_error(join("GPU ", device, " has compute capability ", cc / 100, ".", cc / 10 % 10, "; pyggtrain was built for ", mmq_architectures(), " (",
                                cudaGetErrorString(status), "). Install it again on this machine."));
    }
    const size_t shared = ggml_cuda_info().devices[device].smpbo;
    PYGGTRAIN_CHECK(shared >= 48 * 1024, "shared memory of a block", join(shared, " bytes"), "at least 48 KiB");
}

static void check_weight(ggml_type type, int64_t num_rows, int64_t num_columns, int64_t num_experts) {
    const auto types = mmq_types();
    PYGGTRAIN_CHECK(std::find(types.begin(), types.end(), type) != types.end(), "type", quant_type_name(type), "one of mmq_types()");
    PYGGTRAIN_CHECK(num_columns > 0 && num_columns % K_STEP == 0, "num_columns", num_columns, join("a positive multiple of ", K_STEP));
    PYGGTRAIN_CHECK(num_rows > 0 && num_experts > 0, "weight", join("[", num_experts, ", ", num_rows, ", ", num_columns, "]"), "at least one row");
    // MMQ counts blocks in 32 bits, and work in units of (tile of the output) x (block) in 30.
    const int64_t num_blocks = num_experts * num_rows * (num_columns / ggml_blck_size(type));
    PYGGTRAIN_CHECK(num_blocks < INT32_MAX, "weight", join(num_blocks, " blocks"), "fewer than 2^31");
}

// MMQ chooses among tiles of 8 to 128 rows of x and 64 or 128 rows of W. The smallest tile bounds the number of units from above.
static void check_work(ggml_type type, int64_t num_rows, int64_t num_columns, int64_t num_tokens, int64_t num_experts) {
    const int64_t tiles = num_experts * ((num_rows + 63) / 64) * ((num_tokens + 7) / 8);
    const int64_t work  = tiles * (num_columns / ggml_blck_size(type));
    PYGGTRAIN_CHECK(work < (1 << 30), "x", join(num_tokens, " rows, ", work, " units of work with this weight"), "fewer than 2^30: split the rows");
}

static void check_pointer(uintptr_t pointer, const char * argument, size_t alignment) {
    PYGGTRAIN_CHECK(pointer != 0 && pointer % alignment == 0, argument, join("at address ", pointer), join("an address that is a multiple of ", alignment));
}

static size_t block_alignment(ggml_type type) {
    const size_t bytes = ggml_type_size(type);
    return std::min<size_t>(bytes & -bytes, 16);
}

static void check(const mmq_product & product) {
    check_weight(product.type, product.num_rows, product.num_columns, 1);
    PYGGTRAIN_CHECK(product.num_tokens >= 0, "num_tokens", product.num_tokens, "0 or more");
    check_work(product.type, product.num_rows, product.num_columns, product.num_tokens, 1);
}

static void check(const mmq_expert_product & product) {
    check_weight(product.type, product.num_rows, product.num_columns, product.num_experts);
    // mm_ids_helper keeps a token's number in 22 bits and the place of an expert in 10.
    PYGGTRAIN_CHECK(product.num_tokens >= 0 && product.num_tokens < (1 << 22), "num_tokens", product.num_tokens, "0 to 2^22 - 1");
    PYGGTRAIN_CHECK(product.num_used > 0 && product.num_used <= product.num_experts && product.num_used < (1 << 10), "experts of a token", product.num_used,
                    join("1 to ", std::min<int64_t>(product.num_experts, 1023)));
    PYGGTRAIN_CHECK(product.num_inputs == 1 || product.num_inputs == product.num_used, "inputs of a token", product.num_inputs,
                    join("1 or ", product.num_used, ", the experts of a token"));
    check_work(product.type, product.num_rows, product.num_columns, product.num_tokens, product.num_experts);
}

// As ggml_cuda_mul_mat_q asks for them. Rounded up per buffer, as the pool does.
static size_t activation_bytes(ggml_type type, int64_t num_rows, int64_t num_columns, int64_t num_slots, int64_t num_tokens, int device) {
    const int     cc       = ggml_cuda_info().devices[device].cc;
    const int64_t padded   = GGML_PAD(num_columns, MATRIX_ROW_PADDING);
    const int64_t overhang = ggml_cuda_mmq_get_J_max(type, num_rows % 128 != 0, cc, num_tokens);
    return GGML_PAD(num_slots * padded * sizeof(block_q8_1_mmq) / QK8_1_MMQ + overhang * sizeof(block_q8_1_mmq), ALIGNMENT);
}

static size_t fixup_bytes(int device) {
    // The largest tile, for every multiprocessor; with at least 90 % of them busy MMQ starts a block for each tile and needs none.
    return GGML_PAD((size_t) ggml_cuda_info().devices[device].nsm * 128 * 128 * sizeof(float), ALIGNMENT);
}

size_t mmq_workspace_bytes(const mmq_product & product, int device) {
    check(product);
    const device_guard guard(device);
    return activation_bytes(product.type, product.num_rows, product.num_columns, product.num_tokens, product.num_tokens, device) + fixup_bytes(device);
}

size_t mmq_workspace_bytes(const mmq_expert_product & product, int device) {
    check(product);
    const device_guard guard(device);
    const size_t       num_slots = product.num_tokens * product.num_used;
    return activation_bytes(product.type, product.num_rows, product.num_columns, num_slots, product.num_inputs, device) + fixup_bytes(device) +
           2 * GGML_PAD(num_slots * sizeof(int32_t), ALIGNMENT) + GGML_PAD((product.num_experts + 1) * sizeof(int32_t), ALIGNMENT);
}

// A tensor header over the caller's memory. `strides` of the outer dimensions in bytes.
static ggml_tensor tensor_header(ggml_type type, ggml_backend_buffer * buffer, uintptr_t data, const int64_t (&ne)[3], size_t nb1, size_t nb2) {
    ggml_tensor tensor = {};
    tensor.type        = type;
    tensor.buffer      = buffer;
    tensor.data        = (void *) data;
    std::copy(ne, ne + 3, tensor.ne);
    tensor.ne[3] = 1;
    tensor.nb[0] = ggml_type_size(type);
    tensor.nb[1] = nb1;
    tensor.nb[2] = nb2;
    tensor.nb[3] = nb2 * ne[2];
    return tensor;
}

// Queue the product of prepared headers on the caller's stream.
static void queue(const ggml_tensor & w, const ggml_tensor & x, const ggml_tensor * ids, ggml_tensor & y, const mmq_place & place) {
    check_pointer(place.workspace, "workspace", ALIGNMENT);
    // Activations in 8 bits on every card; Blackwell would take 4 bits for the FP4 types otherwise.
    ggml_set_op_params_i32(&y, 3, GGML_PREC_Q8);
    ggml_backend_cuda_context context(place.device);
    context.pools[place.device][0]   = std::make_unique<workspace_pool>((void *) place.workspace, place.workspace_bytes);
    context.streams[place.device][0] = place.stream == 0 ? cudaStreamLegacy : (cudaStream_t) place.stream;
    ggml_cuda_mul_mat_q(context, &w, &x, ids, &y);
    CUDA_CHECK(cudaGetLastError());
}

void mmq_mul_mat(const mmq_product & product, const mmq_place & place) {
    check(product);
    const device_guard guard(place.device);
    check_card(place.device);
    const int64_t num_rows = product.num_rows, num_columns = product.num_columns, num_tokens = product.num_tokens;
    check_pointer(product.blocks, "blocks", block_alignment(product.type));
    // x is read 4 numbers at a time.
    check_pointer(product.x, "x", 16);
    check_pointer(product.y, "y", sizeof(float));
    PYGGTRAIN_CHECK(product.x_stride % 4 == 0 && product.x_stride >= num_columns, "x_stride", product.x_stride, join("a multiple of 4, at least ", num_columns));
    PYGGTRAIN_CHECK(product.y_stride >= num_rows && product.y_stride * num_tokens < INT32_MAX, "y_stride", product.y_stride,
                    join("at least ", num_rows, ", and fewer than 2^31 elements in all"));
    if (num_tokens == 0) {
        return;
    }
    ggml_backend_buffer weights = {};
    weights.usage               = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    const size_t row_bytes      = ggml_row_size(product.type, num_columns);
    const auto   w = tensor_header(product.type, &weights, product.blocks, { num_columns, num_rows, 1 }, row_bytes, row_bytes * num_rows);
    const size_t x_bytes = product.x_stride * sizeof(float), y_bytes = product.y_stride * sizeof(float);
    const auto   x = tensor_header(GGML_TYPE_F32, &weights, product.x, { num_columns, num_tokens, 1 }, x_bytes, x_bytes * num_tokens);
    auto         y = tensor_header(GGML_TYPE_F32, &weights, product.y, { num_rows, num_tokens, 1 }, y_bytes, y_bytes * num_tokens);
    queue(w, x, nullptr, y, place);
}

void mmq_mul_mat(const mmq_expert_product & product, const mmq_place & place) {
    check(product);
    const device_guard guard(place.device);
    check_card(place.device);
    const int64_t num_rows = product.num_rows, num_columns = product.num_columns, num_tokens = product.num_tokens;
    const size_t  shared   = ggml_cuda_info().devices[place.device].smpbo;
    // One block of mm_ids_helper lists all tokens of an expert in shared memory.
    PYGGTRAIN_CHECK(num_tokens * sizeof(int32_t) <= shared, "num_tokens", num_tokens, join("at most ", shared / sizeof(int32_t), " on this card"));
    check_pointer(product.blocks, "blocks", block_alignment(product.type));
    check_pointer(product.x, "x", 16);
    check_pointer(product.y, "y", sizeof(float));
    check_pointer(product.ids, "ids", sizeof(int32_t));
    PYGGTRAIN_CHECK(num_rows * num_tokens * product.num_used < INT32_MAX, "y", join("[", num_tokens, ", ", product.num_used, ", ", num_rows, "]"),
                    "fewer than 2^31 elements");
    if (num_tokens == 0) {
        return;
    }
    ggml_backend_buffer weights = {};
    weights.usage               = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    const size_t row_bytes      = ggml_row_size(product.type, num_columns);
    const auto   w = tensor_header(product.type, &weights, product.blocks, { num_columns, num_rows, product.num_experts }, row_bytes, row_bytes * num_rows);
    const size_t x_bytes = num_columns * sizeof(float), y_bytes = num_rows * sizeof(float);
    const auto   x = tensor_header(GGML_TYPE_F32, &weights, product.x, { num_columns, product.num_inputs, num_tokens }, x_bytes, x_bytes * product.num_inputs);
    const auto ids = tensor_header(GGML_TYPE_I32, &weights, product.ids, { product.num_used, num_tokens, 1 }, product.num_used * sizeof(int32_t),
                                   product.num_used * num_tokens * sizeof(int32_t));
    auto         y = tensor_header(GGML_TYPE_F32, &weights, product.y, { num_rows, product.num_used, num_tokens }, y_bytes, y_bytes * product.num_used);
    queue(w, x, &ids, y, place);
}

} // namespace pyggtrain

void ggml_cuda_error(const char * statement, const char * function, const char * file, int line, const char * message) {
    (void) file, (void) line;
    // The same error would be reported again by the next call that torch makes.
    (void) cudaGetLastError();
    throw pyggtrain::bridge_error(pyggtrain::join("CUDA: ", message, " (", statement, " in ", function, ")"));
}

int ggml_cuda_get_device() {
    int device;
    CUDA_CHECK(cudaGetDevice(&device));
    return device;
}

void ggml_cuda_set_device(int device) { CUDA_CHECK(cudaSetDevice(device)); }

static ggml_cuda_device_info device_info() {
    ggml_cuda_device_info info = {};
    CUDA_CHECK(cudaGetDeviceCount(&info.physical_device_count));
    info.device_count = std::min(info.physical_device_count, (int) GGML_CUDA_MAX_DEVICES);
    for (int i = 0; i < info.device_count; i++) {
        const auto attribute = [i](cudaDeviceAttr which) {
            int value = 0;
            CUDA_CHECK(cudaDeviceGetAttribute(&value, which, i));
            return value;
        };
        auto & device               = info.devices[i];
        device.cc                   = 100 * attribute(cudaDevAttrComputeCapabilityMajor) + 10 * attribute(cudaDevAttrComputeCapabilityMinor);
        device.nsm                  = attribute(cudaDevAttrMultiProcessorCount);
        device.smpb                 = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
        device.smpbo                = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
        device.warp_size            = attribute(cudaDevAttrWarpSize);
        device.physical_device      = i;
        device.physical_share_count = 1;
    }
    return info;
}

const ggml_cuda_device_info & ggml_cuda_info() {
    static const ggml_cuda_device_info info = device_info();
    return info;
}

// Every context here comes with its pool, and with a stream that belongs to the caller.
std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) {
    throw pyggtrain::bridge_error("MMQ asked for memory on a stream that has no workspace");
}

ggml_backend_cuda_context::~ggml_backend_cuda_context() {}
