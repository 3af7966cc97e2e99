// Thread that ends what a rank waits for on its GPU when the world is aborted. The rank's own
// thread looks for aborts in the waits of its communicators, but not within CUDA's calls: some,
// such as cudaFree and a launch into a full queue, wait for kernels, and those of NCCL for lost
// ranks.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>
#include <thread>

#include "tandem/communicator.h"

namespace tandem::gpu {

class AbortWatch {
 public:
  /// Collective over `control`. Calls `end`, which must not throw, on another thread a second after
  /// an abort of the world, unless this is destroyed before.
  AbortWatch(Communicator& control, std::function<void()> end);

 private:
  void watch(const std::stop_token& stop) const;

  const std::unique_ptr<Communicator> comm_;  // of the thread
  const std::shared_ptr<SymmetricBuffer> aborts_;
  const std::function<void()> end_;
  std::jthread thread_;
};

}  // namespace tandem::gpu
