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
  struct null_graph *captured_by; /* what is queued goes there; NULL: to the stream */
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

/* Graphs: what would be queued, kept to be queued as often as the graph is launched. A node is one task, or a graph. */
typedef struct null_graph null_graph;
typedef struct task null_node;

null_graph *null_graph_new(void);
size_t null_graph_nodes(null_graph *graph);
void null_graph_capture(null_graph *graph, void *stream); /* NULL: the stream is captured no more */
null_graph *null_graph_of(void *stream);                  /* which captures it; NULL: none */
void null_graph_launch(null_graph *graph, void *stream);
null_node *null_graph_add_kernel(null_graph *graph, const char *name);
null_node *null_graph_add_copy(null_graph *graph, void *to, const void *from, size_t bytes);
null_node *null_graph_add_fill(null_graph *graph, void *to, const void *pattern, size_t pattern_bytes, size_t count);
null_node *null_graph_add_graph(null_graph *graph, null_graph *child); /* of NULL: a node that does nothing */
void null_node_set(null_node *node, const null_node *other);           /* the node does what `other` does, from now on */

null_event *null_event_new(void);
void null_event_record(null_event *event, void *stream);
int null_event_is_done(null_event *event);
void null_event_wait(null_event *event);

#endif
