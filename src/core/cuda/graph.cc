#include "core/cuda/graph.h"

#include "core/cuda/check.h"

namespace tandem::gpu {

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  check(cudaStreamIsCapturing(stream, &status), "whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

uint64_t capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long number = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &number), "a stream's capture");
  return status == cudaStreamCaptureStatusActive ? number : 0;
}

Graph::Graph(cudaStream_t stream, const std::function<void()>& enqueue) {
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin a capture");
  cudaGraph_t graph = nullptr;
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();  // do not report the capture's error at the next launch
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph), "end a capture");
  cudaGraphExec_t ready = nullptr;
  const cudaError_t code =
      cudaGraphInstantiate(&ready, graph, cudaGraphInstantiateFlagUseNodePriority);
  cudaGraphDestroy(graph);
  check(code, "instantiate a graph");
  owner_.reset(ready);
}

void Graph::upload(cudaStream_t stream) const {
  check(cudaGraphUpload(owner_.get(), stream), "upload a graph");
}

void Graph::launch(cudaStream_t stream) const {
  check(cudaGraphLaunch(owner_.get(), stream), "launch a graph");
}

}  // namespace tandem::gpu
