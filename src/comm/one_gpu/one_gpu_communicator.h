// The `one_gpu` transport: ranks are threads of one process that share a GPU, each with SMs of its
// own (GpuShare). Symmetric memory is every rank's own, known to the others by its address. It runs
// the kernels of the `nccl` transport where there is one GPU only, to test and to study them: its
// times are no results.
//
// Ranks are in teams of at most kMaxGpus, in the order of the world's ranks. Those of a team
// address each other, as on one node. Where ranks are of two teams no kernel but PairExchange's
// takes another rank's addresses, and data moves as between nodes.
//
// An emulated link may be laid between them (comm/device/line.h).
//
// NCCL takes no part. Nothing here waits for the whole device, as a kernel of another rank may wait
// for what this one has not enqueued yet. Calls of CUDA that wait behind a running kernel (a
// graph's destruction, a library's first launch) hold the context's lock, so that no other rank can
// enqueue. So ranks meet twice in a collective call: when each has captured what it is about to
// enqueue, which loads and allocates what that needs, and when all have enqueued it. At any other
// time the GPU finishes without the host.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/one_gpu/pair_exchange.h"

namespace tandem::gpu {

/// How often each rank of a communicator has come to meet the others, and which threads made its
/// last call.
struct Meetings {
  std::array<std::atomic<uint64_t>, kMostSharing> of{};
  std::array<std::atomic<pid_t>, kMostSharing> threads{};
};

/// What outlives the ranks of one world: where they meet, and symmetric memory that they could not
/// agree to free, as one of them failed or ended alone. Peers may still write into it until all
/// have ended.
class OneGpuWorld {
 public:
  explicit OneGpuWorld(std::optional<EmulatedLink> link = {}) : link_(link) {}
  const std::optional<EmulatedLink>& link() const { return link_; }
  Meetings* new_meetings() {
    const std::lock_guard lock(mutex_);
    return meetings_.emplace_back(std::make_unique<Meetings>()).get();
  }
  void keep(std::vector<OwnedSymmetric> memory) {
    const std::lock_guard lock(mutex_);
    std::ranges::move(memory, std::back_inserter(kept_));
  }

 private:
  const std::optional<EmulatedLink> link_;
  std::mutex mutex_;
  std::vector<OwnedSymmetric> kept_;
  std::vector<std::unique_ptr<Meetings>> meetings_;
};

class OneGpuCommunicator final : public GpuCommunicator {
 public:
  /// Collective over `control`, whose ranks are threads of this process; it and `held` as
  /// GpuCommunicator's. Uses this thread's share, and `line`, or one of its own where the world has
  /// a link. `team`: this rank's.
  OneGpuCommunicator(Communicator& control, std::shared_ptr<OneGpuWorld> world, int team,
                     std::shared_ptr<OwnedLine> line = nullptr,
                     std::shared_ptr<HeldWorld> held = nullptr);
  ~OneGpuCommunicator() override;

  std::string_view transport() const override { return "one_gpu"; }
  std::string link() const override;
  bool shares_gpu() const override { return size_ > 1; }
  void prepare(const std::function<void()>& step) override;
  /// Messages between pairs of ranks.
  PairExchange& pairs() const { return *pairs_; }

 private:
  std::shared_ptr<GpuBuffer> do_allocate(size_t bytes, int signals) override;
  std::unique_ptr<GpuCommunicator> do_split(Communicator& control) override;
  void abandon(std::vector<OwnedSymmetric> left) override;
  void enqueued() noexcept override;
  std::string where_ranks_are() const override;
  /// Returns when all ranks have come as often, or after the deadline or an abort: then the
  /// device's own waits tell what is missing.
  void meet() noexcept;
  bool aborted() const noexcept;

  std::shared_ptr<OneGpuWorld> world_;
  int team_;
  std::shared_ptr<OwnedLine> owned_line_;
  CommonStream rehearsals_{Common::capture};
  Meetings* meetings_ = nullptr;
  uint64_t met_ = 0;
  bool prepared_ = false;  // the call at hand
  bool together_ = true;   // until a rank did not come
  std::unique_ptr<PairExchange> pairs_;
};

/// That face of `comm`, where it has one.
OneGpuCommunicator* as_one_gpu(GpuCommunicator& comm);

}  // namespace tandem::gpu
