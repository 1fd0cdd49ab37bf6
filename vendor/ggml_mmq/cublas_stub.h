// Stands in for cuBLAS's header, cublas_v2.h, while llama.cpp's MMQ is compiled: ggml-cuda/common.cuh mentions these names in inline functions that
// nothing here calls. So neither cuBLAS nor its headers (400 MB) are needed for the build.
#pragma once
#include <cuda_runtime_api.h>

typedef struct cublasContext * cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
typedef enum { CUBLAS_TF32_TENSOR_OP_MATH = 3 } cublasMath_t;
#define CUBLAS_VER_MAJOR 13
#define CUBLAS_VER_MINOR 0
extern "C" {
cublasStatus_t cublasCreate(cublasHandle_t *);
cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t);
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t);
cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *, size_t);
const char *   cublasGetStatusString(cublasStatus_t);
}
