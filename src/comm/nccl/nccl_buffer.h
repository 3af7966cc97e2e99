// Symmetric memory of GPUs that have a rank each: a window of NCCL's.
#pragma once

#include <nccl.h>

#include "comm/device/gpu_communicator.h"
#include "comm/nccl/lsa_pointers.h"

namespace tandem::gpu {

class NcclMemory final : public SymmetricMemory {
 public:
  /// `*comm`: none after a failure.
  explicit NcclMemory(const ncclComm_t* comm) : comm_(comm) {}
  ~NcclMemory() override;
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  /// The bytes of a window that holds so many.
  static size_t pages(size_t bytes);
  /// Zeroed memory of this rank.
  void obtain(size_t total, cudaStream_t stream);
  /// Collective: the peers' addresses. Throws Unsupported where GPUs cannot map each other.
  void map(size_t total, LsaAddresses& addresses, int ranks, cudaStream_t stream);
  std::byte* local() const { return local_; }

 private:
  const ncclComm_t* comm_;
  std::byte* local_ = nullptr;
  ncclWindow_t window_ = nullptr;
};

}  // namespace tandem::gpu
