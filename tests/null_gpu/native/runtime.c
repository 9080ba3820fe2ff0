/* libcudart.so.12: TensorFlow registers its kernels here when it is loaded, and launches them by the address of a host function. */
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "null_gpu.h"

enum { BUCKETS = 1 << 16, RUNTIME_VERSION = 12050 };

typedef struct kernel {
  const void *function;
  const char *name;
  struct kernel *next;
} kernel;

static kernel *kernels[BUCKETS];
static __thread struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} launch; /* between a push of the configuration and its pop */

static unsigned bucket(const void *function) { return (unsigned)((uintptr_t)function >> 4) % BUCKETS; }

static const char *name_of(const void *function) {
  for (kernel *one = kernels[bucket(function)]; one; one = one->next)
    if (one->function == function) return one->name;
  return "a kernel that was not registered";
}

/* Registration: by static constructors, one thread */

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t bytes, int constant,
                       int global) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name, int limit, void *thread,
                            void *block, void *block_size, void *grid_size, int *warp) {
  kernel *one = malloc(sizeof *one);
  *one = (kernel){function, name, kernels[bucket(function)]};
  kernels[bucket(function)] = one;
}

/* Launches */

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  launch.grid = grid, launch.block = block, launch.shared = shared, launch.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = launch.grid, *block = launch.block, *shared = launch.shared, *(cudaStream_t *)stream = launch.stream;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return null_gpu_kernel(stream, name_of(function), 0), cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return null_gpu_kernel(config->stream, name_of(function), 0), cudaSuccess;
}
/* From 12.x on the compiler's own code asks for a kernel and launches that: it stays the function's address. */
cudaError_t __cudaGetKernel(void **found, const void *function) { return *found = (void *)function, cudaSuccess; }
cudaError_t __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
cudaError_t cudaGetFuncBySymbol(cudaFunction_t *found, const void *function) {
  return *found = (cudaFunction_t)name_of(function), cudaSuccess; /* the driver's functions are names */
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared,
                                                                   unsigned flags) {
  return *blocks = 2, cudaSuccess;
}

/* Devices */

cudaError_t cudaRuntimeGetVersion(int *version) { return *version = RUNTIME_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = RUNTIME_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) { return *count = (int)null_gpu_setting("NULL_GPU_DEVICES", 1), cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = null_gpu_current() < 0 ? 0 : null_gpu_current(), cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return null_gpu_set_current(device), cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 1, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  return *value = null_gpu_attribute(attribute), cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t error) { return "an error of the null GPU"; }
const char *cudaGetErrorString(cudaError_t error) { return "an error of the null GPU"; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) { /* the header names it ..._v2 */
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "Null GPU");
  properties->totalGlobalMem = (size_t)null_gpu_setting("NULL_GPU_BYTES", 1L << 30);
  properties->sharedMemPerBlock = null_gpu_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = null_gpu_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = null_gpu_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->regsPerBlock = null_gpu_attribute(cudaDevAttrMaxRegistersPerBlock);
  properties->warpSize = null_gpu_attribute(cudaDevAttrWarpSize);
  properties->maxThreadsPerBlock = null_gpu_attribute(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsPerMultiProcessor = null_gpu_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->multiProcessorCount = null_gpu_attribute(cudaDevAttrMultiProcessorCount);
  properties->major = null_gpu_attribute(cudaDevAttrComputeCapabilityMajor);
  properties->minor = null_gpu_attribute(cudaDevAttrComputeCapabilityMinor);
  properties->clockRate = null_gpu_attribute(cudaDevAttrClockRate);
  properties->memoryClockRate = null_gpu_attribute(cudaDevAttrMemoryClockRate);
  properties->memoryBusWidth = null_gpu_attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties->l2CacheSize = null_gpu_attribute(cudaDevAttrL2CacheSize);
  for (int axis = 0; axis < 3; axis++) {
    properties->maxThreadsDim[axis] = null_gpu_attribute(cudaDevAttrMaxBlockDimX + axis);
    properties->maxGridSize[axis] = null_gpu_attribute(cudaDevAttrMaxGridDimX + axis);
  }
  return cudaSuccess;
}

/* Memory */

cudaError_t cudaMalloc(void **address, size_t bytes) {
  *address = null_gpu_allocate(bytes, null_gpu_current() < 0 ? 0 : null_gpu_current());
  return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *address) { return null_gpu_free(address), cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return null_gpu_copy(stream, to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  char pattern = (char)value;
  return null_gpu_fill(stream, to, &pattern, sizeof pattern, bytes), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return *event = (cudaEvent_t)16, cudaSuccess; }
