// Symmetric memory of GPUs with one rank each: an NCCL window.
#pragma once

#include <nccl.h>

#include <atomic>

#include "comm/device/gpu_communicator.h"
#include "comm/nccl/lsa_pointers.h"

namespace tandem::gpu {

class NcclMemory final : public SymmetricMemory {
 public:
  /// `*comm`: null after a failure.
  explicit NcclMemory(const std::atomic<ncclComm_t>* comm) : comm_(comm) {}
  ~NcclMemory() override;
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  /// Size in bytes of a window that holds `bytes`.
  static size_t pages(size_t bytes);
  /// Allocates zeroed memory of this rank.
  void obtain(size_t total, cudaStream_t stream);
  /// Collective: maps the peers' memory and writes `addresses`. Throws Unsupported if GPUs cannot
  /// map each other's memory.
  void map(size_t total, LsaAddresses& addresses, int ranks, cudaStream_t stream);
  std::byte* local() const { return local_; }

 private:
  const std::atomic<ncclComm_t>* comm_;
  std::byte* local_ = nullptr;
  ncclWindow_t window_ = nullptr;
};

}  // namespace tandem::gpu
