// Calls captured by the test in its own graph, as a user may. Ranks that share a GPU synchronize
// around every launch: the transport sees calls, not launches of a caller's graph.
#pragma once

#include <functional>

#include "comm/device/gpu_communicator.h"
#include "core/cuda/graph.h"

namespace tandem::test {

class CapturedCalls {
 public:
  /// Collective.
  CapturedCalls(gpu::GpuCommunicator& comm, const std::function<void()>& calls)
      : comm_(comm), graph_(comm.stream(), calls) {
    graph_.upload(comm.stream());
    comm.synchronize();
    comm.barrier("every rank has captured its calls");
  }
  /// Collective, on the communicator's stream.
  void launch() const {
    graph_.launch(comm_.stream());
    if (comm_.shares_gpu()) comm_.barrier("every rank has launched its graph");
  }

 private:
  gpu::GpuCommunicator& comm_;
  gpu::Graph graph_;
};

}  // namespace tandem::test
