/* libcuda.so.1: what TensorFlow asks of the driver. What it does not ask is a stub that logs its name: see building.py. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "streams.h"

enum { CUDA_VERSION_OF_DRIVER = 12050, HOPPER_MAJOR = 9, HOPPER_MINOR = 0 };

/* A context is a device: its handle points into this array. */
static char contexts[NULL_GPU_MAX_DEVICES];

static size_t memory_bytes(void) { return (size_t)null_gpu_setting("NULL_GPU_BYTES", 1L << 30); }
static CUcontext context_of(int device) { return device < 0 ? NULL : (CUcontext)(contexts + device); }
static int device_of(CUcontext context) { return context ? (int)((char *)context - contexts) : -1; }
static int current_or_first(void) { return null_gpu_current() < 0 ? 0 : null_gpu_current(); }

/* Devices: figures of an H100 */

int null_gpu_attribute(int attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 227 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 228 << 10;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1700000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2600000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return HOPPER_MAJOR;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return HOPPER_MINOR;
    default: return 0;
  }
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION_OF_DRIVER, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = (int)null_gpu_setting("NULL_GPU_DEVICES", 1), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *name, int length, CUdevice device) { return snprintf(name, length, "Null GPU"), CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) { return *bytes = memory_bytes(), CUDA_SUCCESS; }
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { return memset(uuid, device + 1, sizeof *uuid), CUDA_SUCCESS; }
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) { return *can = 1, CUDA_SUCCESS; }
CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
  return *value = 1, CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return *value = null_gpu_attribute(attribute), CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
  return snprintf(id, length, "0000:%02x:00.0", device + 1), CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **name) { return *name = "CUDA_ERROR_OF_NULL_GPU", CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "an error of the null GPU", CUDA_SUCCESS; }

/* Contexts */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = context_of(device), CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = context_of(null_gpu_current()), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return null_gpu_set_current(device_of(context)), CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }
CUresult cuCtxPopCurrent(CUcontext *context) { return context ? cuCtxGetCurrent(context) : CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = current_or_first(), CUDA_SUCCESS; }
CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) { return *version = CUDA_VERSION_OF_DRIVER, CUDA_SUCCESS; }
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) { return CUDA_SUCCESS; }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}

/* Memory */

CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
  *address = (CUdeviceptr)null_gpu_allocate(bytes, current_or_first());
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned flags) { return cuMemAlloc(address, bytes); }
CUresult cuMemFree(CUdeviceptr address) { return null_gpu_free((void *)address), CUDA_SUCCESS; }
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
  *address = null_gpu_allocate(bytes, -1);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAllocHost(void **address, size_t bytes) { return cuMemHostAlloc(address, bytes, 0); }
CUresult cuMemFreeHost(void *address) { return null_gpu_free(address), CUDA_SUCCESS; }
CUresult cuMemGetInfo(size_t *free, size_t *total) {
  *total = memory_bytes();
  *free = *total - *total / 32; /* some is the driver's */
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  int owner = null_gpu_owner((void *)address);
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *(unsigned *)value = owner < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    *(int *)value = owner;
  else
    *(int *)value = 0;
  return CUDA_SUCCESS;
}

/* Copies: a call that is not asynchronous is one on the default stream that is waited for */

static CUresult copy_now(void *to, const void *from, size_t bytes) {
  null_gpu_copy(NULL, to, from, bytes);
  null_stream_wait(NULL);
  return CUDA_SUCCESS;
}
static CUresult copy_in(CUstream stream, void *to, const void *from, size_t bytes) {
  return null_gpu_copy(stream, to, from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) { return copy_now((void *)to, from, bytes); }
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) { return copy_now(to, (void *)from, bytes); }
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return copy_now((void *)to, (void *)from, bytes); }
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  return copy_in(stream, (void *)to, from, bytes);
}
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_in(stream, to, (void *)from, bytes);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_in(stream, (void *)to, (void *)from, bytes);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_in(stream, (void *)to, (void *)from, bytes);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext there, CUdeviceptr from, CUcontext here, size_t bytes, CUstream stream) {
  return copy_in(stream, (void *)to, (void *)from, bytes);
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return null_gpu_fill(stream, (void *)to, &value, sizeof value, count), CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return null_gpu_fill(stream, (void *)to, &value, sizeof value, count), CUDA_SUCCESS;
}
CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
  return cuMemsetD8Async(to, value, count, NULL), null_stream_wait(NULL), CUDA_SUCCESS;
}
CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t count) {
  return cuMemsetD32Async(to, value, count, NULL), null_stream_wait(NULL), CUDA_SUCCESS;
}

/* Streams and events */

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  return *stream = (CUstream)null_stream_new(null_gpu_current()), CUDA_SUCCESS;
}
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
CUresult cuStreamDestroy(CUstream stream) { return null_stream_wait(stream), CUDA_SUCCESS; } /* its thread sleeps on */
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
  return *context = context_of(null_gpu_stream_device(stream)), CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream stream) { return null_stream_wait(stream), CUDA_SUCCESS; }
CUresult cuStreamQuery(CUstream stream) { return null_stream_is_idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return null_stream_wait_for(stream, (null_event *)event), CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent *event, unsigned flags) { return *event = (CUevent)null_event_new(), CUDA_SUCCESS; }
CUresult cuEventDestroy(CUevent event) { return CUDA_SUCCESS; } /* a stream may still come to it */
CUresult cuEventRecord(CUevent event, CUstream stream) {
  return null_event_record((null_event *)event, stream), CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent event) { return null_event_is_done((null_event *)event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }
CUresult cuEventSynchronize(CUevent event) { return null_event_wait((null_event *)event), CUDA_SUCCESS; }
CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) { return *milliseconds = 1, CUDA_SUCCESS; }
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
  return null_gpu_call(stream, function, argument, NULL), CUDA_SUCCESS;
}

typedef struct {
  CUstreamCallback function;
  CUstream stream;
  void *argument;
} callback;

static void run_callback(void *argument) {
  callback *one = argument;
  one->function(one->stream, CUDA_SUCCESS, one->argument);
  free(one);
}
CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback function, void *argument, unsigned flags) {
  callback *one = malloc(sizeof *one);
  *one = (callback){function, stream, argument};
  return null_gpu_call(stream, run_callback, one, NULL), CUDA_SUCCESS;
}

/* Modules and kernels: a function is its name */

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)contexts, CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) { return cuModuleLoadData(module, image); }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return *function = (CUfunction)strdup(name), CUDA_SUCCESS;
}
/* How large a variable is stands in the module, which nobody reads here; XLA copies its constants into them. So each has room for
 * any, whose pages are taken when they are written. */
CUresult cuModuleGetGlobal(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name) {
  size_t size = 1L << 28;
  if (address) *address = (CUdeviceptr)null_gpu_allocate(size, current_or_first());
  if (bytes) *bytes = size;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
  return *blocks = 2, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction f, int threads, size_t shared, unsigned g) {
  return *blocks = 2, CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments, void **extra) {
  return null_gpu_kernel(stream, (const char *)function, 0), CUDA_SUCCESS;
}
