/* libnccl.so.2: communicators whose ranks must call the same operations in the same order.
 *
 * As on a GPU, an operation runs in its stream's turn, a device runs one at a time, and it holds the device until every rank of
 * its communicator has come: two communicators of a device whose operations come in different orders on two ranks wait for each
 * other for ever. Real NCCL lets the sender of a small broadcast go before its receivers have come; here it never does.
 *
 * What fits in a meeting's payload is moved by all-gathers, broadcasts and all-to-alls; of reductions a rank gets its own part.
 */
#define _GNU_SOURCE
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "meeting.h"
#include "null_gpu.h"

enum { VERSION = 22707, LINE = 512, MAX_IN_GROUP = 256 };

struct ncclComm {
  char name[64];
  meeting *where;
  int rank, size, device;
  long operations; /* called so far */
};

static const size_t bytes_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const char *const dtypes[] = {"int8",    "uint8",   "int32",    "uint32",      "int64",      "uint64",
                                     "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
static const char *const reductions[] = {"sum", "product", "max", "min", "average"};

/* One operation */

typedef enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL } kind;

typedef struct {
  kind kind;
  ncclComm_t comm;
  long number;
  const char *from; /* of an all-to-all these are `size` pieces of `bytes` */
  char *to;
  size_t bytes; /* of this rank's input; of a reduce-scatter, of one of its rows */
  int root;
  char words[MEETING_WORDS];
  char *line; /* what the log says; ends with the moment at which all had come */
} operation;

static pthread_mutex_t running[NULL_GPU_MAX_DEVICES]; /* a device runs one at a time */

static const char *brought(operation *one, int rank) { return one->comm->where->members[rank].brought[one->number % 2].payload; }

static void move(operation *one) {
  int rank = one->comm->rank, size = one->comm->size;
  switch (one->kind) {
    case ALL_REDUCE:
      if (one->to != one->from) memcpy(one->to, one->from, one->bytes);
      break;
    case REDUCE_SCATTER: memmove(one->to, one->from + rank * one->bytes, one->bytes); break;
    case BROADCAST:
      if (one->bytes <= MEETING_PAYLOAD) memcpy(one->to, brought(one, one->root), one->bytes);
      break;
    case ALL_GATHER:
      for (int other = 0; other < size && one->bytes <= MEETING_PAYLOAD; other++)
        memcpy(one->to + other * one->bytes, brought(one, other), one->bytes);
      break;
    case ALL_TO_ALL:
      for (int other = 0; other < size && one->bytes * size <= MEETING_PAYLOAD; other++)
        memcpy(one->to + other * one->bytes, brought(one, other) + rank * one->bytes, one->bytes);
      break;
  }
}

/* What a rank sends in a ring. */
static size_t sent_bytes(operation *one) {
  size_t others = one->comm->size - 1;
  if (one->kind == BROADCAST) return one->bytes;
  return one->kind == ALL_REDUCE ? 2 * one->bytes * others / one->comm->size : one->bytes * others;
}

static long microseconds(operation *one) {
  double mib = sent_bytes(one) / 1048576.0;
  return null_gpu_time("NULL_GPU_MESSAGE_US") + (long)(mib * null_gpu_time("NULL_GPU_MESSAGE_US_PER_MIB"));
}

static void run(void *argument) {
  operation *one = argument;
  ncclComm_t comm = one->comm;
  pthread_mutex_t *device = &running[comm->device];
  pthread_mutex_lock(device);
  int is_source = one->kind == ALL_GATHER || one->kind == ALL_TO_ALL || (one->kind == BROADCAST && one->root == comm->rank);
  size_t brings = one->kind == ALL_TO_ALL ? one->bytes * comm->size : one->bytes;
  int is_met = meeting_hold(comm->where, comm->name, comm->rank, comm->size, one->number, one->words,
                            is_source ? one->from : NULL, brings);
  if (is_met) {
    snprintf(one->line + strlen(one->line), 32, "%.1f", null_gpu_now());
    null_gpu_nap(microseconds(one));
    move(one);
    pthread_mutex_unlock(device); /* else the device stays held: what is queued behind must not seem to go on */
  } else {
    for (;;) pause();
  }
  free(one);
}

/* Queues an operation of `count` elements. The log has: kind, communicator, rank, size, number, bytes, dtype, root or reduction,
 * addresses of input and output. */
static ncclResult_t call(kind kind, const char *name, const void *from, void *to, size_t count, ncclDataType_t dtype,
                         const char *detail, int root, ncclComm_t comm, cudaStream_t stream) {
  operation *one = calloc(1, sizeof *one);
  one->kind = kind, one->comm = comm, one->from = from, one->to = to, one->root = root;
  one->bytes = count * bytes_of[dtype];
  one->number = comm->operations++;
  one->line = calloc(1, LINE);
  snprintf(one->words, sizeof one->words, "%s of %zu %s, %s", name, count, dtypes[dtype], detail);
  snprintf(one->line, LINE - 32, "%s\t%s\t%d\t%d\t%ld\t%zu\t%s\t%s\t%p\t%p\t", name, comm->name, comm->rank, comm->size,
           one->number, one->bytes * (kind == REDUCE_SCATTER || kind == ALL_TO_ALL ? comm->size : 1), dtypes[dtype], detail, from,
           to);
  null_gpu_call(stream, run, one, one->line);
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return call(ALL_REDUCE, "AllReduce", from, to, count, dtype, reductions[op], -1, comm, stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  return call(ALL_GATHER, "AllGather", from, to, count, dtype, "", -1, comm, stream);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return call(REDUCE_SCATTER, "ReduceScatter", from, to, count, dtype, reductions[op], -1, comm, stream);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  char detail[32];
  snprintf(detail, sizeof detail, "root %d", root);
  return call(BROADCAST, "Broadcast", from, to, count, dtype, detail, root, comm, stream);
}

/* Groups: of communicators to be made, and of sends and receives, which only an all-to-all consists of */

static __thread int depth;
static __thread ncclComm_t to_join[MAX_IN_GROUP];
static __thread int joining;
static __thread struct {
  const void *first_sent;
  void *first_received;
  size_t count;
  ncclDataType_t dtype;
  int sends, receives;
  ncclComm_t comm;
  cudaStream_t stream;
} exchange;

static void join(ncclComm_t comm) {
  char text[LINE];
  if (!meeting_join(comm->where, comm->name, comm->rank, comm->size))
    for (;;) pause(); /* until the process ends, which it soon does */
  double now = null_gpu_now();
  snprintf(text, sizeof text, "%s\t%d\t%d", comm->name, comm->rank, comm->size);
  null_gpu_log("communicator", comm->device, -1, now, now, now, text);
}

ncclResult_t ncclGroupStart(void) {
  if (depth++ == 0) joining = exchange.sends = exchange.receives = 0;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  if (--depth) return ncclSuccess;
  for (int place = 0; place < joining; place++) to_join[place]->where->members[to_join[place]->rank].has_joined = 1;
  for (int place = 0; place < joining; place++) join(to_join[place]);
  if (!exchange.sends && !exchange.receives) return ncclSuccess;
  if (exchange.sends != exchange.comm->size || exchange.receives != exchange.comm->size) {
    null_gpu_fail("A group of sends and receives that is no all-to-all: the null GPU has none.");
    return ncclInvalidUsage;
  }
  return call(ALL_TO_ALL, "AllToAll", exchange.first_sent, exchange.first_received, exchange.count, exchange.dtype, "", -1,
              exchange.comm, exchange.stream);
}

static ncclResult_t only_in_group(void) {
  if (depth) return ncclSuccess;
  null_gpu_fail("A send or receive outside a group: the null GPU has none.");
  return ncclInvalidUsage;
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  if (peer == 0) exchange.first_sent = from;
  exchange.sends++;
  exchange.count = count, exchange.dtype = dtype, exchange.comm = comm, exchange.stream = stream;
  return only_in_group();
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  if (peer == 0) exchange.first_received = to;
  exchange.receives++;
  return only_in_group();
}

/* Communicators */

ncclResult_t ncclGetVersion(int *version) { return *version = VERSION, ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static atomic_int made;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "comm.%d.%d", getpid(), atomic_fetch_add(&made, 1));
  memset(id->internal + 64, 'x', sizeof id->internal - 64); /* TensorFlow takes no key with zeros at its end */
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *made, int size, ncclUniqueId id, int rank) {
  ncclComm_t comm = calloc(1, sizeof *comm);
  snprintf(comm->name, sizeof comm->name, "%.63s", id.internal);
  comm->where = meeting_open(comm->name);
  comm->rank = rank, comm->size = size, comm->device = null_gpu_current() < 0 ? 0 : null_gpu_current();
  if (!comm->where || size > MEETING_RANKS || joining == MAX_IN_GROUP) return ncclSystemError;
  *made = comm;
  if (depth)
    to_join[joining++] = comm;
  else
    join(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return ncclCommInitRank(made, size, id, rank);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { return *count = comm->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { return *error = ncclSuccess, ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : "an error of the null NCCL"; }
const char *ncclGetLastError(ncclComm_t comm) { return "an error of the null NCCL"; }
