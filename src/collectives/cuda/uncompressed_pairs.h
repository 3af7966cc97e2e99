// Uncompressed collectives for ranks without NCCL (pair_exchange.h), for cases that the pipelined
// kernels (shard_exchange.h) do not support: enqueued on the communicator's stream.
#pragma once

#include <span>

#include "comm/one_gpu/one_gpu_communicator.h"
#include "tandem/collectives.h"

namespace tandem::gpu {

/// f32, bf16, f16 or i32; floats are summed in f32. The first call of a size allocates.
void pairs_all_reduce(OneGpuCommunicator& comm, const Tensor& in, const Tensor& out, ReduceOp op);
/// Uses shard owners, as between nodes, if ranks are in two teams.
void pairs_all_gather(OneGpuCommunicator& comm, const Tensor& shard, const Tensor& out);
void pairs_reduce_scatter(OneGpuCommunicator& comm, const Tensor& data, const Tensor& shard,
                          ReduceOp op);
void pairs_all_to_all(OneGpuCommunicator& comm, const Tensor& send,
                      std::span<const int64_t> send_counts, const Tensor& recv,
                      std::span<const int64_t> recv_counts);
void pairs_broadcast(OneGpuCommunicator& comm, const Tensor& data, int root);
void pairs_send(OneGpuCommunicator& comm, const Tensor& data, int peer);
/// Runs on another stream than the communicator's, which takes its position in its order.
void pairs_exchange(OneGpuCommunicator& comm, const Tensor& sent, int to, const Tensor& received,
                    int from, cudaStream_t stream);
void pairs_recv(OneGpuCommunicator& comm, const Tensor& data, int peer);

}  // namespace tandem::gpu
