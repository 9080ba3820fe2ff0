/* What the stand-ins for NVIDIA's libraries share. All of it lives in the stand-in for libcuda, which the others link.
 *
 * A null GPU computes nothing. Its memory is real (the host's), its streams keep their order and take time, and everything that
 * is asked of it is logged. The environment describes it:
 *
 *   NULL_GPU_DEVICES      how many there are
 *   NULL_GPU_BYTES        memory of each
 *   NULL_GPU_PRODUCT_US   microseconds that a matrix product takes
 *   NULL_GPU_MESSAGE_US   microseconds that a collective takes once all of its ranks have come
 *   NULL_GPU_MESSAGE_US_PER_MIB  and so many more for each MiB that a rank sends in a ring
 *   NULL_GPU_TIMEOUT_S    seconds after which a collective that is waited for is a deadlock: the process says who waits, and ends
 *   NULL_GPU_FOLDER       where processes log, and where ranks of different processes meet
 */
#ifndef NULL_GPU_H
#define NULL_GPU_H

#include <stddef.h>

enum { NULL_GPU_MAX_DEVICES = 64, NULL_GPU_FAILED = 87 };

long null_gpu_setting(const char *name, long otherwise);
const char *null_gpu_folder(void);
double null_gpu_now(void); /* microseconds, one clock for all processes of the machine */
void null_gpu_nap(long microseconds);

/* Devices. -1: this thread has chosen none. */
int null_gpu_current(void);
void null_gpu_set_current(int device);
int null_gpu_attribute(int attribute); /* the driver's CUdevice_attribute and the runtime's cudaDeviceAttr are the same numbers */

/* Memory. The owner of an address is a device, or -1 for the host. */
void *null_gpu_allocate(size_t bytes, int device);
void null_gpu_free(void *address);
int null_gpu_owner(const void *address);

/* What a stream does, in its order. A stream of 0 is the device's default stream. */
void null_gpu_kernel(void *stream, const char *name, int is_product);
void null_gpu_copy(void *stream, void *to, const void *from, size_t bytes);
void null_gpu_fill(void *stream, void *to, const void *pattern, size_t pattern_bytes, size_t count);
void null_gpu_call(void *stream, void (*work)(void *), void *argument, char *text); /* logs `text` with what `work` left in it */
int null_gpu_stream_device(void *stream);

/* The log: one line each, fields separated by tabs; see log.py. */
void null_gpu_log(const char *kind, int device, int stream, double queued, double began, double ended, const char *text);
void null_gpu_note(const char *text);                /* by the test: a mark in the log */
void null_gpu_set_condition(int value);              /* by the test: what a bool or int32 is that the host reads from a device */
void null_gpu_set_pace(int times);                   /* by the test: how many times as long products and messages take */
long null_gpu_time(const char *name);                /* the setting of this name, microseconds, at that pace */
long null_gpu_unknown(const char *name, long value); /* a function that nobody has written: logged, and returns `value` */
void null_gpu_fail(const char *text);                /* logs and prints an error; the process ends soon after */

#endif
