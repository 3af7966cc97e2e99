// Collectives as NCCL calls, enqueued on the communicator's stream: for sizes where our kernels
// gain nothing, for reductions they lack, and between nodes. If ranks share a GPU there is no NCCL:
// our kernels do the same (uncompressed_pairs.h, shard_exchange.h).
#pragma once

#include "comm/nccl/nccl_communicator.h"
#include "tandem/collectives.h"

namespace tandem::gpu {

/// True if NCCL is available: it rejects ranks that share a GPU.
inline bool has_nccl(const GpuCommunicator& comm) {
  return nccl_of(comm) != nullptr;
}

/// Groups NCCL calls into one. The group also ends if `body` throws: an open one would swallow the
/// thread's later calls.
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
  check(comm, ncclGroupEnd(), "ncclGroupEnd");
}

/// Collective: creates the replacement for NCCL if ranks share a GPU. It allocates, which is not
/// allowed in a captured call: operators with such a candidate call it when they are constructed.
void prepare_nccl(GpuCommunicator& comm);
/// Waits on the device until all ranks have come to this call, with a deadline, which NCCL's
/// kernels do not have. Collective; the first one allocates, and is left out of a captured graph.
void enter_nccl(GpuCommunicator& comm, OpId op);
void nccl_all_reduce(GpuCommunicator& comm, const Tensor& in, const Tensor& out, ReduceOp op);
void nccl_all_gather(GpuCommunicator& comm, const Tensor& shard, const Tensor& out);
/// Runs on `stream`, which takes the communicator's position in its order.
void nccl_exchange(GpuCommunicator& comm, const Tensor& sent, int to, const Tensor& received,
                   int from, cudaStream_t stream);
void nccl_reduce_scatter(GpuCommunicator& comm, const Tensor& data, const Tensor& shard,
                         ReduceOp op);

}  // namespace tandem::gpu
