/* libcublasLt.so.12: products with an epilogue. Descriptors hold nothing, so that all are one. */
#include <cublasLt.h>
#include <string.h>

#include "null_gpu.h"

static char descriptor[64];

size_t cublasLtGetVersion(void) { return 120500; }
size_t cublasLtGetCudartVersion(void) { return 12050; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return *handle = (void *)descriptor, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *made, cublasComputeType_t compute, cudaDataType_t scale) {
  return *made = (void *)descriptor, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, cudaDataType type, uint64_t rows, uint64_t columns,
                                          int64_t stride) {
  return *made = (void *)descriptor, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) {
  return *made = (void *)descriptor, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *found) {
  memset(results, 0, sizeof *results);
  return *found = 1, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algorithm,
                              void *workspace, size_t bytes, cudaStream_t stream) {
  return null_gpu_kernel(stream, "cublasLtMatmul", 1), CUBLAS_STATUS_SUCCESS;
}
