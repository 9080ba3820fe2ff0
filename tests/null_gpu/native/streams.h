/* Streams and events, for the stand-in of the driver alone. */
#ifndef NULL_GPU_STREAMS_H
#define NULL_GPU_STREAMS_H

#include <pthread.h>

#include "null_gpu.h"

struct task;

typedef struct null_stream {
  int number, device;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct task *head, *tail; /* the head is being done */
  long queued, finished;
} null_stream;

typedef struct null_event {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  long recorded, done;
} null_event;

null_stream *null_stream_new(int device);
void null_stream_wait(void *stream);
int null_stream_is_idle(void *stream);
void null_stream_wait_for(void *stream, null_event *event);

null_event *null_event_new(void);
void null_event_record(null_event *event, void *stream);
int null_event_is_done(null_event *event);
void null_event_wait(null_event *event);

#endif
