// Collectives of GPU ranks, on device tensors, enqueued on the communicator's stream.
// tandem/collectives.h lists the sums computed by our kernels (rank order, f32 accumulation);
// all_gather uses our kernel on one node; everything else is NCCL.
#pragma once

#include <span>

#include "tandem/collectives.h"

namespace tandem::gpu {

inline bool is_gpu(const Communicator& comm) {
  return comm.on_gpu();
}

void all_reduce(Communicator& comm, const Tensor& data, ReduceOp op);
/// Over a wire format with groups; Unsupported on several nodes. Allocates in the first call of a
/// wire and dtype, and in calls with more elements than before. Captured calls stay valid.
void all_reduce(Communicator& comm, const Tensor& data, const Wire& wire, const Tensor* residual);
void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard, const Wire& wire,
                    const Tensor* residual);
void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out, const Wire& wire);
void all_to_all(Communicator& comm, const Tensor& send, std::span<const int64_t> send_counts,
                const Tensor& recv, std::span<const int64_t> recv_counts, const Wire& wire);
void all_gather(Communicator& comm, const Tensor& shard, const Tensor& out);
void reduce_scatter(Communicator& comm, const Tensor& data, const Tensor& shard, ReduceOp op);
void all_to_all(Communicator& comm, const Tensor& send, std::span<const int64_t> send_counts,
                const Tensor& recv, std::span<const int64_t> recv_counts);
void broadcast(Communicator& comm, const Tensor& data, int root);
void send(Communicator& comm, const Tensor& data, int peer);
void recv(Communicator& comm, const Tensor& data, int peer);

}  // namespace tandem::gpu
