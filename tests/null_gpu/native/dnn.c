/* libcudnn.so.9: that it is there, and its version. No convolution runs on a null GPU. */
#include <stddef.h>

enum { SUCCESS = 0, MAJOR = 9, MINOR = 3 };

size_t cudnnGetVersion(void) { return MAJOR * 10000 + MINOR * 100; }
size_t cudnnGetCudartVersion(void) { return 12050; }
int cudnnGetProperty(int type, int *value) { return *value = type == 0 ? MAJOR : type == 1 ? MINOR : 0, SUCCESS; }
int cudnnCreate(void **handle) { return *handle = (void *)16, SUCCESS; }
const char *cudnnGetErrorString(int error) { return "an error of the null GPU"; }
