/* libcublas.so.12: a product is a kernel that takes NULL_GPU_PRODUCT_US. A handle remembers its stream. */
#include <cublas_v2.h>
#include <stdio.h>
#include <stdlib.h>

#include "null_gpu.h"

struct cublasContext {
  cudaStream_t stream;
};

cublasStatus_t cublasCreate(cublasHandle_t *handle) { return *handle = calloc(1, sizeof **handle), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasDestroy(cublasHandle_t handle) { return free(handle), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) { return handle->stream = stream, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t *stream) { return *stream = handle->stream, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetVersion(cublasHandle_t handle, int *version) { return *version = 120500, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetProperty(libraryPropertyType type, int *value) {
  return *value = type == MAJOR_VERSION ? 12 : type == MINOR_VERSION ? 5 : 0, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
  return *mode = CUBLAS_DEFAULT_MATH, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t *mode) {
  return *mode = CUBLAS_POINTER_MODE_HOST, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes) { return CUBLAS_STATUS_SUCCESS; }

/* A plain product of float32 tells the log where it reads and writes, and how many bytes. */
#undef cublasSgemm_v2
cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t transposes_a, cublasOperation_t transposes_b, int m, int n,
                              int k, const float *alpha, const float *a, int lda, const float *b, int ldb, const float *beta,
                              float *c, int ldc) {
  char text[160];
  size_t size = sizeof *a;
  snprintf(text, sizeof text, "cublasSgemm_v2\t%p\t%zu\t%p\t%zu\t%p\t%zu", (void *)a, size * m * k, (void *)b, size * k * n,
           (void *)c, size * m * n);
  return null_gpu_kernel(handle->stream, text, 1), CUBLAS_STATUS_SUCCESS;
}

/* Products, by the names that TensorFlow looks up. Only the handle is read, which all of them have first. */
#undef cublasSgemm
#undef cublasDgemm
#define PRODUCT(name) \
  int null_##name(cublasHandle_t handle) __asm__(#name); \
  int null_##name(cublasHandle_t handle) { return null_gpu_kernel(handle->stream, #name, 1), CUBLAS_STATUS_SUCCESS; }
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasGemmBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemmBatched)
PRODUCT(cublasDgemmBatched)
