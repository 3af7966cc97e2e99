// Plain collectives as NCCL's own calls, enqueued on the communicator's stream: for sizes where
// kernels of ours gain nothing, for what they do not sum, and between nodes. Where ranks share a
// GPU there is no NCCL: kernels of ours do the same (plain_pairs.h, part_exchange.h).
#pragma once

#include "comm/nccl/nccl_communicator.h"
#include "tandem/collectives.h"

namespace tandem::gpu {

/// Whether there is an NCCL: not where ranks share a GPU, which it refuses.
inline bool has_nccl(const GpuCommunicator& comm) {
  return nccl_of(comm) != nullptr;
}

/// Many NCCL calls as one. The group ends with this, also where `body` throws: an open one would
/// swallow the thread's later calls.
template <typename Body>
void grouped(const GpuCommunicator& comm, Body body) {
  struct Open {
    bool ended = false;
    ~Open() {
      if (!ended) ncclGroupEnd();
    }
  };
  if (!has_nccl(comm)) return body();
  check(ncclGroupStart(), "ncclGroupStart");
  Open group;
  body();
  group.ended = true;
  check(ncclGroupEnd(), "ncclGroupEnd");
}

/// Collective: makes what stands in for NCCL where ranks share a GPU. It allocates, which no
/// captured call may: operators that have such a candidate make it when they are constructed.
void prepare_nccl(GpuCommunicator& comm);
void nccl_all_reduce(GpuCommunicator& comm, const Tensor& in, const Tensor& out, ReduceOp op);
void nccl_all_gather(GpuCommunicator& comm, const Tensor& shard, const Tensor& out);
/// On `stream`, which takes the communicator's place in its order.
void nccl_exchange(GpuCommunicator& comm, const Tensor& sent, int to, const Tensor& received,
                   int from, cudaStream_t stream);
void nccl_reduce_scatter(GpuCommunicator& comm, const Tensor& data, const Tensor& shard,
                         ReduceOp op);

}  // namespace tandem::gpu
