// All-gather and reduce-scatter of small parts: each rank stores what every other one needs into
// its memory, all of it, and waits once. As the one_shot all-reduce (all_reduce.h), whose exchange
// and alternating staging it shares.
#pragma once

#include <memory>

#include "collectives/cuda/exchange.h"
#include "collectives/cuda/partition.h"
#include "comm/device/gpu_communicator.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

class OneShotParts {
 public:
  static constexpr int64_t kMaxPartBytes = int64_t(1) << 20;

  /// Collective.
  explicit OneShotParts(GpuCommunicator& comm);
  static bool fits(const Tensor& whole, int ranks);
  /// As those of PartExchange, for what fits.
  void all_gather(const Tensor& shard, const Tensor& out, OpId op);
  void reduce_scatter(const Tensor& data, const Tensor& shard, OpId op);

 private:
  ExchangeJob job(const Partition& parts, OpId op) const;

  GpuCommunicator& comm_;
  std::shared_ptr<GpuBuffer> staging_;
  DeviceMemory calls_;  // a CallCounter
};

}  // namespace tandem::gpu
