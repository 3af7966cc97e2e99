// `nccl` transport: each rank owns one GPU. Device memory is symmetric NCCL windows that every GPU
// of the node addresses directly.
//
// For tests, ranks that are processes may share one GPU. The GPU runs their contexts in turns, so a
// kernel that waits for another rank delays it, but does not keep it from running. NCCL refuses two
// ranks on a GPU of one node, so it takes each process for a node; symmetric memory is IpcMemory.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/device/gpu_communicator.h"
#include "comm/device/gpu_coordinates.h"
#include "comm/nccl/abort_watch.h"
#include "comm/nccl/lsa_pointers.h"

namespace tandem::gpu {

/// Throws DeviceError unless `code` is success.
void check(ncclResult_t code, const char* what);

/// Checks a call of `comm`: throws Aborted instead if a rank was lost, which NCCL may notice first.
void check(const GpuCommunicator& comm, ncclResult_t code, const char* what);

class NcclCommunicator final : public GpuCommunicator {
 public:
  /// Collective. `control` and `world` as in GpuCommunicator. Uses this thread's share of a GPU.
  /// `is_split`: of another one. Throws InvalidArgument if ranks have the same GPU, with
  /// `shares_process_gpu` if they have not; Timeout if a rank is missing.
  explicit NcclCommunicator(Communicator& control, std::shared_ptr<WorldState> world = nullptr,
                            bool shares_process_gpu = false, bool is_split = false);
  ~NcclCommunicator() override;

  std::string_view transport() const override { return "nccl"; }
  std::string link() const override;
  bool has_whole_gpu() const override { return !shares_process_gpu_; }
  ncclComm_t nccl() const { return nccl_; }

 private:
  std::shared_ptr<GpuBuffer> do_allocate(size_t bytes, int signals) override;
  std::unique_ptr<GpuCommunicator> do_split(Communicator& control) override;
  void do_give_up() const override;
  void await_give_up(std::chrono::steady_clock::time_point until) const override;
  void abandon(std::vector<OwnedSymmetric> left) override;
  void agree_on_paths(std::span<const GpuCoordinates> coordinates);
  void connect(const ncclUniqueId& id);
  OwnedSymmetric obtain_window(size_t bytes, std::vector<RankMemory>& memories);
  OwnedSymmetric obtain_shared(size_t bytes, std::vector<RankMemory>& memories);

  const bool shares_process_gpu_;
  mutable std::atomic<ncclComm_t> nccl_ = nullptr;  // null after a failure
  mutable std::future<void> aborted_;
  Mapped<LsaAddresses> addresses_;
  Stream registering_{Priority::high};
  std::optional<AbortWatch> watch_;  // of the world's communicator
};

/// NCCL communicator of these ranks; nullptr if there is none, as with several ranks on one GPU.
ncclComm_t nccl_of(const GpuCommunicator& comm);

}  // namespace tandem::gpu
