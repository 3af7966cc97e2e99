// All-gather and reduce-scatter of small shards: each rank stores all data that another one needs
// directly into its memory, and waits once. Shares the exchange and alternating staging of the
// one_shot all-reduce (all_reduce.h).
#pragma once

#include <memory>

#include "collectives/cuda/exchange.h"
#include "collectives/cuda/partition.h"
#include "comm/device/gpu_communicator.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

class OneShotShards {
 public:
  static constexpr int64_t kMaxShardBytes = int64_t(1) << 20;

  /// Collective.
  explicit OneShotShards(GpuCommunicator& comm);
  static bool fits(const Tensor& whole, int ranks);
  /// Like those of ShardExchange, for tensors that fit.
  void all_gather(const Tensor& shard, const Tensor& out, OpId op);
  void reduce_scatter(const Tensor& data, const Tensor& shard, OpId op);

 private:
  ExchangeParams make_params(const Partition& shards, OpId op) const;

  GpuCommunicator& comm_;
  std::shared_ptr<GpuBuffer> staging_;
  DeviceMemory calls_;  // a CallCounter
};

}  // namespace tandem::gpu
