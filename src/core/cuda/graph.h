// Work on a stream, captured once and launched again by a single call of the driver.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <type_traits>

namespace tandem::gpu {

/// Whether what is put on `stream` goes into a graph that somebody captures.
bool is_captured(cudaStream_t stream);

class Graph {
 public:
  /// What `enqueue` puts on `stream`, and on streams that fork from it and join it again. Nothing
  /// of it runs yet. Kernels keep the priority of the stream they were put on. Calls of other
  /// threads are not disturbed; when `enqueue` throws, `stream` is as before.
  Graph(cudaStream_t stream, const std::function<void()>& enqueue);
  void launch(cudaStream_t stream) const;
  /// What the first launch would have to allocate, in the stream's order.
  void upload(cudaStream_t stream) const;

 private:
  // A graph that is still running is freed when it has ended.
  struct Destroy {
    void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
  };
  std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy> owner_;
};

}  // namespace tandem::gpu
