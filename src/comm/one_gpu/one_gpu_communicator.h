// The `one_gpu` transport: ranks are threads of one process that share a GPU, each with SMs of its
// own (GpuShare). Symmetric memory is every rank's own, known to the others by its address. It runs
// the kernels of the `nccl` transport where there is one GPU only, to test and to study them: its
// times are no results.
//
// NCCL takes no part. Nothing here waits for the whole device, as a kernel of another rank may wait
// for what this one has not enqueued yet.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/one_gpu/pair_exchange.h"

namespace tandem::gpu {

/// What outlives the ranks of one world: symmetric memory that they could not agree to free, as
/// one of them failed. Peers may still write into it until all have ended.
class OneGpuWorld {
 public:
  void keep(std::vector<OwnedSymmetric> memory) {
    const std::lock_guard lock(mutex_);
    std::ranges::move(memory, std::back_inserter(kept_));
  }

 private:
  std::mutex mutex_;
  std::vector<OwnedSymmetric> kept_;
};

class OneGpuCommunicator final : public GpuCommunicator {
 public:
  /// Collective over `control`, whose ranks are threads of this process. It and `world` must
  /// outlive this. Uses this thread's share.
  OneGpuCommunicator(Communicator& control, OneGpuWorld& world);
  ~OneGpuCommunicator() override;

  std::string_view transport() const override { return "one_gpu"; }
  std::string link() const override;
  /// Messages between pairs of ranks.
  PairExchange& pairs() const { return *pairs_; }

 private:
  std::shared_ptr<GpuBuffer> do_allocate(size_t bytes, int signals) override;
  std::unique_ptr<GpuCommunicator> do_split(Communicator& control) override;
  void abandon(std::vector<OwnedSymmetric> left) override;

  OneGpuWorld& world_;
  std::unique_ptr<PairExchange> pairs_;
};

/// That face of `comm`, where it has one.
OneGpuCommunicator* as_one_gpu(GpuCommunicator& comm);

}  // namespace tandem::gpu
