/* libnvidia-ml.so.1: the driver's version, and GPUs without NVLink. */
#include <stdio.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { return snprintf(version, length, "555.42.06"), SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 12050, SUCCESS; }
const char *nvmlErrorString(int error) { return "an error of the null GPU"; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return *device = NULL, SUCCESS; }
int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned *generation) { return *generation = 5, SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *width) { return *width = 16, SUCCESS; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *is_active) { return *is_active = 0, SUCCESS; }
