/* Streams and events. A stream is a thread that does what is queued, in its order; that is all that CUDA promises, too. */
#define _GNU_SOURCE
#include "streams.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct task {
  void (*work)(struct task *, null_stream *);
  const char *kind; /* of its line in the log; NULL: none */
  char *text;       /* freed with the task */
  double queued;
  long microseconds;
  void *to;
  const void *from;
  size_t bytes, count;
  char pattern[8];
  null_event *event;
  long tick;
  void (*function)(void *);
  void *argument;
  null_graph *child; /* of a graph's node: it stands for that */
  struct task *next;
} task;

struct null_graph {
  task *head, *tail;
  size_t nodes;
};

static __thread int current = -1;
static null_stream *default_streams[NULL_GPU_MAX_DEVICES];
static pthread_mutex_t default_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int stream_numbers = 1;
static atomic_int condition = 0;
static atomic_int pace = 1;

int null_gpu_current(void) { return current; }
void null_gpu_set_current(int device) { current = device; }
void null_gpu_set_condition(int value) { atomic_store(&condition, value); }
void null_gpu_set_pace(int times) { atomic_store(&pace, times); }
long null_gpu_time(const char *name) { return null_gpu_setting(name, 0) * pace; }

/* The thread of a stream */

static void *run(void *argument) {
  null_stream *stream = argument;
  current = stream->device;
  for (;;) {
    pthread_mutex_lock(&stream->lock);
    while (!stream->head) pthread_cond_wait(&stream->changed, &stream->lock);
    task *one = stream->head;
    pthread_mutex_unlock(&stream->lock);
    double began = null_gpu_now();
    one->work(one, stream);
    if (one->kind) null_gpu_log(one->kind, stream->device, stream->number, one->queued, began, null_gpu_now(), one->text);
    pthread_mutex_lock(&stream->lock);
    stream->head = one->next;
    if (!stream->head) stream->tail = NULL;
    stream->finished++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    free(one->text);
    free(one);
  }
  return NULL;
}

null_stream *null_stream_new(int device) {
  null_stream *stream = calloc(1, sizeof *stream);
  stream->number = atomic_fetch_add(&stream_numbers, 1);
  stream->device = device < 0 ? 0 : device;
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  pthread_t thread;
  pthread_create(&thread, NULL, run, stream);
  pthread_detach(thread);
  return stream;
}

static null_stream *resolved(void *stream) {
  if ((size_t)stream > 2) return stream; /* 1 and 2 are CUDA's names of the default stream */
  int device = current < 0 ? 0 : current;
  pthread_mutex_lock(&default_lock);
  if (!default_streams[device]) default_streams[device] = null_stream_new(device);
  pthread_mutex_unlock(&default_lock);
  return default_streams[device];
}

int null_gpu_stream_device(void *stream) { return resolved(stream)->device; }

static task *new_task(void (*work)(task *, null_stream *), const char *kind, const char *text) {
  task *one = calloc(1, sizeof *one);
  one->work = work;
  one->kind = kind;
  one->text = text ? strdup(text) : NULL;
  one->queued = null_gpu_now();
  return one;
}

static task *append(null_graph *graph, task *one) {
  if (graph->tail)
    graph->tail->next = one;
  else
    graph->head = one;
  graph->tail = one;
  graph->nodes++;
  return one;
}

static void push(void *handle, task *one) {
  null_stream *stream = resolved(handle);
  if (stream->captured_by) {
    append(stream->captured_by, one);
    return;
  }
  pthread_mutex_lock(&stream->lock);
  if (stream->tail)
    stream->tail->next = one;
  else
    stream->head = one;
  stream->tail = one;
  stream->queued++;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
}

void null_stream_wait(void *handle) {
  null_stream *stream = resolved(handle);
  pthread_mutex_lock(&stream->lock);
  for (long until = stream->queued; stream->finished < until;) pthread_cond_wait(&stream->changed, &stream->lock);
  pthread_mutex_unlock(&stream->lock);
}

int null_stream_is_idle(void *handle) {
  null_stream *stream = resolved(handle);
  pthread_mutex_lock(&stream->lock);
  int is_idle = stream->finished == stream->queued;
  pthread_mutex_unlock(&stream->lock);
  return is_idle;
}

/* Kernels, copies, calls */

static void take_time(task *one, null_stream *stream) {
  (void)stream;
  null_gpu_nap(one->microseconds);
}

static task *kernel_task(const char *name, int is_product) {
  task *one = new_task(take_time, is_product ? "product" : "kernel", name);
  if (is_product) one->microseconds = null_gpu_time("NULL_GPU_PRODUCT_US");
  return one;
}

void null_gpu_kernel(void *stream, const char *name, int is_product) { push(stream, kernel_task(name, is_product)); }

static void copy(task *one, null_stream *stream) {
  (void)stream;
  memmove(one->to, one->from, one->bytes);
  if (null_gpu_owner(one->from) < 0 || null_gpu_owner(one->to) >= 0) return;
  /* No kernel has computed a condition: the test says what it is, or ranks would branch by what memory happens to hold. */
  if (one->bytes == 1) *(char *)one->to = (char)condition;
  if (one->bytes == sizeof(int)) *(int *)one->to = condition;
}

static task *copy_task(void *to, const void *from, size_t bytes) {
  char text[64];
  int source = null_gpu_owner(from), target = null_gpu_owner(to);
  const char *direction = source < 0 ? (target < 0 ? "HtoH" : "HtoD") : target < 0 ? "DtoH" : source == target ? "DtoD" : "peer";
  snprintf(text, sizeof text, "%s\t%zu", direction, bytes);
  task *one = new_task(copy, "copy", text);
  one->to = to, one->from = from, one->bytes = bytes;
  return one;
}

void null_gpu_copy(void *stream, void *to, const void *from, size_t bytes) { push(stream, copy_task(to, from, bytes)); }

static void fill(task *one, null_stream *stream) {
  (void)stream;
  for (size_t place = 0; place < one->count; place++)
    memcpy((char *)one->to + place * one->bytes, one->pattern, one->bytes);
}

static task *fill_task(void *to, const void *pattern, size_t pattern_bytes, size_t count) {
  task *one = new_task(fill, NULL, NULL);
  one->to = to, one->bytes = pattern_bytes, one->count = count;
  memcpy(one->pattern, pattern, pattern_bytes);
  return one;
}

void null_gpu_fill(void *stream, void *to, const void *pattern, size_t pattern_bytes, size_t count) {
  push(stream, fill_task(to, pattern, pattern_bytes, count));
}

static void call(task *one, null_stream *stream) {
  (void)stream;
  one->function(one->argument);
}

void null_gpu_call(void *stream, void (*work)(void *), void *argument, char *text) {
  task *one = new_task(call, text ? "nccl" : NULL, NULL);
  one->text = text; /* not copied: `work` may write to it */
  one->function = work, one->argument = argument;
  push(stream, one);
}

/* Graphs */

null_graph *null_graph_new(void) { return calloc(1, sizeof(null_graph)); }
size_t null_graph_nodes(null_graph *graph) { return graph->nodes; }
void null_graph_capture(null_graph *graph, void *stream) { resolved(stream)->captured_by = graph; }
null_graph *null_graph_of(void *stream) { return resolved(stream)->captured_by; }

void null_graph_launch(null_graph *graph, void *stream) {
  for (task *node = graph->head; node; node = node->next) {
    if (node->child) null_graph_launch(node->child, stream);
    if (!node->work) continue;
    task *one = malloc(sizeof *one);
    *one = *node;
    one->text = node->text ? strdup(node->text) : NULL;
    one->queued = null_gpu_now(), one->next = NULL;
    push(stream, one);
  }
}

null_node *null_graph_add_kernel(null_graph *graph, const char *name) { return append(graph, kernel_task(name, 0)); }
null_node *null_graph_add_copy(null_graph *graph, void *to, const void *from, size_t bytes) {
  return append(graph, copy_task(to, from, bytes));
}
null_node *null_graph_add_fill(null_graph *graph, void *to, const void *pattern, size_t pattern_bytes, size_t count) {
  return append(graph, fill_task(to, pattern, pattern_bytes, count));
}
null_node *null_graph_add_graph(null_graph *graph, null_graph *child) {
  task *node = new_task(NULL, NULL, NULL);
  node->child = child;
  return append(graph, node);
}

void null_node_set(null_node *node, const null_node *other) {
  task *next = node->next;
  free(node->text);
  *node = *other;
  node->text = other->text ? strdup(other->text) : NULL;
  node->next = next;
}

/* Events: "recorded" counts the calls of record, "done" those that the stream has come to */

null_event *null_event_new(void) {
  null_event *event = calloc(1, sizeof *event);
  pthread_mutex_init(&event->lock, NULL);
  pthread_cond_init(&event->changed, NULL);
  return event;
}

static void wait_until(null_event *event, long tick) {
  pthread_mutex_lock(&event->lock);
  while (event->done < tick) pthread_cond_wait(&event->changed, &event->lock);
  pthread_mutex_unlock(&event->lock);
}

static long recorded(null_event *event, int more) {
  pthread_mutex_lock(&event->lock);
  long tick = event->recorded += more;
  pthread_mutex_unlock(&event->lock);
  return tick;
}

static void do_record(task *one, null_stream *stream) {
  (void)stream;
  pthread_mutex_lock(&one->event->lock);
  if (one->event->done < one->tick) one->event->done = one->tick;
  pthread_cond_broadcast(&one->event->changed);
  pthread_mutex_unlock(&one->event->lock);
}

static void do_wait(task *one, null_stream *stream) {
  (void)stream;
  wait_until(one->event, one->tick);
}

void null_event_record(null_event *event, void *stream) {
  task *one = new_task(do_record, NULL, NULL);
  one->event = event, one->tick = recorded(event, 1);
  push(stream, one);
}

void null_stream_wait_for(void *stream, null_event *event) {
  task *one = new_task(do_wait, NULL, NULL);
  one->event = event, one->tick = recorded(event, 0);
  push(stream, one);
}

int null_event_is_done(null_event *event) {
  pthread_mutex_lock(&event->lock);
  int is_done = event->done >= event->recorded;
  pthread_mutex_unlock(&event->lock);
  return is_done;
}

void null_event_wait(null_event *event) { wait_until(event, recorded(event, 0)); }
