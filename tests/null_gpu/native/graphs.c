/* Graphs of the driver: XLA's, which it launches again and again. A graph is the list of its nodes in the order in which they were
 * added; what it is made for is the graph itself, and an update of what was made is one of its node. */
#include <cuda.h>

#include "streams.h"

static null_graph *graph_of(CUgraph graph) { return (null_graph *)graph; }
static CUresult made(CUgraphNode *node, null_node *one) { return *node = (CUgraphNode)one, CUDA_SUCCESS; }
static null_node *node_of(CUgraphNode node) { return (null_node *)node; }

CUresult cuGraphCreate(CUgraph *graph, unsigned flags) { return *graph = (CUgraph)null_graph_new(), CUDA_SUCCESS; }
CUresult cuGraphDestroy(CUgraph graph) { return CUDA_SUCCESS; } /* a node of another graph may stand for it */
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *number) {
  return *number = null_graph_nodes(graph_of(graph)), nodes ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *ready, CUgraph graph, unsigned long long flags) {
  return *ready = (CUgraphExec)graph, CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec ready) { return CUDA_SUCCESS; }
CUresult cuGraphUpload(CUgraphExec ready, CUstream stream) { return CUDA_SUCCESS; }
CUresult cuGraphLaunch(CUgraphExec ready, CUstream stream) {
  return null_graph_launch((null_graph *)ready, stream), CUDA_SUCCESS;
}

/* Nodes */

static null_node *add_copy(null_graph *graph, const CUDA_MEMCPY3D *copy) {
  void *to = copy->dstMemoryType == CU_MEMORYTYPE_HOST ? copy->dstHost : (void *)copy->dstDevice;
  const void *from = copy->srcMemoryType == CU_MEMORYTYPE_HOST ? copy->srcHost : (void *)copy->srcDevice;
  return null_graph_add_copy(graph, to, from, copy->WidthInBytes * copy->Height * copy->Depth);
}
static null_node *add_fill(null_graph *graph, const CUDA_MEMSET_NODE_PARAMS *fill) {
  return null_graph_add_fill(graph, (void *)fill->dst, &fill->value, fill->elementSize, fill->width * fill->height);
}
CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t number) {
  return made(node, null_graph_add_graph(graph_of(graph), NULL));
}
CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t number,
                              const CUDA_KERNEL_NODE_PARAMS *kernel) {
  return made(node, null_graph_add_kernel(graph_of(graph), (const char *)kernel->func));
}
CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t number, const CUDA_MEMCPY3D *copy,
                              CUcontext context) {
  return made(node, add_copy(graph_of(graph), copy));
}
CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t number,
                              const CUDA_MEMSET_NODE_PARAMS *fill, CUcontext context) {
  return made(node, add_fill(graph_of(graph), fill));
}
CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t number, CUgraph child) {
  return made(node, null_graph_add_graph(graph_of(graph), graph_of(child)));
}
/* Of all kinds of nodes: graphs alone. Conditions, which no kernel computes, are not there. */
CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t number, CUgraphNodeParams *what) {
  if (what->type != CU_GRAPH_NODE_TYPE_GRAPH) return CUDA_ERROR_NOT_SUPPORTED;
  return cuGraphAddChildGraphNode(node, graph, after, number, what->graph.graph);
}

/* Updates of what was made */

static CUresult set(CUgraphNode node, null_node *one) { return null_node_set(node_of(node), one), CUDA_SUCCESS; }
CUresult cuGraphExecKernelNodeSetParams(CUgraphExec ready, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *kernel) {
  return CUDA_SUCCESS; /* other arguments: a kernel has none here */
}
CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec ready, CUgraphNode node, const CUDA_MEMCPY3D *copy, CUcontext context) {
  return set(node, add_copy(null_graph_new(), copy));
}
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec ready, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *fill,
                                        CUcontext context) {
  return set(node, add_fill(null_graph_new(), fill));
}
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec ready, CUgraphNode node, CUgraph child) {
  return set(node, null_graph_add_graph(null_graph_new(), graph_of(child)));
}

/* What a stream is asked for while it is captured goes to the graph. */

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,
                                     size_t number, CUstreamCaptureMode mode) {
  return null_graph_capture(graph_of(graph), stream), CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  return null_graph_capture(null_graph_new(), stream), CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  *graph = (CUgraph)null_graph_of(stream);
  return null_graph_capture(NULL, stream), CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = null_graph_of(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
