// `one_gpu` transport: ranks are threads of one process that share a GPU, each with its own SMs
// (GpuShare). Symmetric memory is each rank's own allocation, whose address the others know. It
// runs the kernels of the `nccl` transport on a single GPU, to test and study them: its times are
// not results.
//
// Ranks are in teams of at most kMaxGpus, in the order of the world's ranks. Ranks of a team
// address each other, as on one node. If ranks are in two teams, only the kernels of PairExchange
// use another rank's addresses, and data moves as between nodes.
//
// An emulated link can be placed between them (comm/device/link_pacer.h).
//
// NCCL is not used. Nothing here waits for the whole device, as a kernel of another rank may wait
// for work that this rank has not enqueued yet. CUDA calls that wait for a running kernel (a
// graph's destruction, a library's first launch) hold the context's lock, so no other rank can
// enqueue. So ranks synchronize twice in a collective call: when each has captured what it is about
// to enqueue, which loads and allocates what that needs, and when all have enqueued it. At any
// other time the GPU finishes without the host.
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

/// Number of times each rank of a communicator has entered await_all(), and the threads that made
/// its last call.
struct Meetings {
  std::array<std::atomic<uint64_t>, kMaxSharing> of{};
  std::array<std::atomic<pid_t>, kMaxSharing> threads{};
};

/// State that outlives the ranks of one world: their meetings, and symmetric memory that they could
/// not agree to free, as one of them failed or ended independently. Peers may still write into it
/// until all have ended.
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
    std::ranges::move(memory, std::back_inserter(unfreed_));
  }

 private:
  const std::optional<EmulatedLink> link_;
  std::mutex mutex_;
  std::vector<OwnedSymmetric> unfreed_;
  std::vector<std::unique_ptr<Meetings>> meetings_;
};

class OneGpuCommunicator final : public GpuCommunicator {
 public:
  /// Collective over `control`, whose ranks are threads of this process; `control` and `state` as
  /// in GpuCommunicator. Uses this thread's GPU share, and the pacer `link_pacer`, or a new one if
  /// the world has a link. `team`: this rank's.
  OneGpuCommunicator(Communicator& control, std::shared_ptr<OneGpuWorld> world, int team,
                     std::shared_ptr<OwnedLinkPacer> link_pacer = nullptr,
                     std::shared_ptr<WorldState> state = nullptr);
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
  /// Returns when all ranks have entered as often, or after the deadline or an abort; the device's
  /// own waits then report what is missing.
  void await_all() noexcept;
  bool aborted() const noexcept;

  std::shared_ptr<OneGpuWorld> world_;
  int team_;
  std::shared_ptr<OwnedLinkPacer> owned_link_pacer_;
  CommonStream rehearsals_{Common::capture};
  Meetings* meetings_ = nullptr;
  uint64_t met_ = 0;
  bool prepared_ = false;  // the current call is prepared
  bool together_ = true;   // until a rank did not arrive
  std::unique_ptr<PairExchange> pairs_;
};

/// Casts `comm` to a OneGpuCommunicator; nullptr if it is another.
OneGpuCommunicator* as_one_gpu(GpuCommunicator& comm);

}  // namespace tandem::gpu
