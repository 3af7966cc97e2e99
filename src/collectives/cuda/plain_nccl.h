// Plain collectives as NCCL's own calls, enqueued on the communicator's stream: for sizes where
// kernels of ours gain nothing, for what they do not sum, and between nodes.
#pragma once

#include "comm/device/gpu_communicator.h"
#include "tandem/collectives.h"

namespace tandem::gpu {

/// Many NCCL calls as one. The group ends with this, also where `body` throws: an open one would
/// swallow the thread's later calls.
template <typename Body>
void grouped(Body body) {
  struct Open {
    bool ended = false;
    ~Open() {
      if (!ended) ncclGroupEnd();
    }
  };
  check(ncclGroupStart(), "ncclGroupStart");
  Open group;
  body();
  group.ended = true;
  check(ncclGroupEnd(), "ncclGroupEnd");
}

void nccl_all_reduce(GpuCommunicator& comm, const Tensor& in, const Tensor& out, ReduceOp op);
void nccl_all_gather(GpuCommunicator& comm, const Tensor& shard, const Tensor& out);
void nccl_reduce_scatter(GpuCommunicator& comm, const Tensor& data, const Tensor& shard,
                         ReduceOp op);

}  // namespace tandem::gpu
