// CUDA graphs captured from a stream and launched with one driver call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

namespace tandem::gpu {

/// Whether `stream` is being captured.
bool is_captured(cudaStream_t stream);
/// Number of the capture that `stream` is part of; 0: none.
uint64_t capture_of(cudaStream_t stream);

class Graph {
 public:
  /// Captures the work that `enqueue` puts on `stream`, and on streams that fork from and join it,
  /// without running it. Kernels keep the priority of their stream. Does not affect calls of other
  /// threads; if `enqueue` throws, `stream` is restored.
  Graph(cudaStream_t stream, const std::function<void()>& enqueue);
  void launch(cudaStream_t stream) const;
  /// Performs the allocations of the first launch, in stream order.
  void upload(cudaStream_t stream) const;

 private:
  // Destroying a running graph is deferred by CUDA until it has ended.
  struct Destroy {
    void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
  };
  std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy> owner_;
};

}  // namespace tandem::gpu
