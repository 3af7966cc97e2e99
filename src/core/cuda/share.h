// Share of a GPU that a rank uses: all of it, or, if several ranks share one, SMs of its own (a
// green context). Like CUDA's current device it is per thread: streams, device memory and grids of
// a rank are made from the share of its thread.
//
// If ranks share a GPU, some calls would wait for all of its kernels, including those of other
// ranks, which may wait for this one: cudaFree, cudaFreeHost, cudaDeviceSynchronize,
// cublasLtDestroy. A share that is not alone avoids them: memory is allocated from the device's
// pool in stream order, and memory that cannot be freed in time is kept for later allocations.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace tandem::gpu {

enum class Priority { normal, high };

class GpuShare {
 public:
  /// Whole GPU `device` as usable by this thread: the SMs granted by its context or MPS.
  static std::shared_ptr<GpuShare> whole(int device);
  /// One of `num_shares` equal and disjoint shares of `device`, created once per process. Throws
  /// Unsupported if the driver has no green contexts or the GPU has too few SMs.
  static std::shared_ptr<GpuShare> share_of(int device, int num_shares, int index);
  ~GpuShare();
  GpuShare(const GpuShare&) = delete;
  GpuShare& operator=(const GpuShare&) = delete;

  int device() const { return device_; }
  /// Whether no other rank of this process has SMs of the same GPU.
  bool alone() const { return !green_; }
  /// Identifies the context that kernels are loaded into: the device (null), or a green context of
  /// it.
  const void* context() const { return green_; }
  /// SMs that a grid may rely on; the same on all ranks of a world.
  int sms() const { return sms_; }
  /// Grid size of a kernel designed for `maximum` blocks on a whole GPU, `per_sm` per SM.
  int blocks(int maximum, int per_sm = 1) const;
  /// Max resident clusters of `size` blocks, one SM each; `on_device`: the occupancy query's answer
  /// for the whole GPU.
  int clusters(int on_device, int size) const;

  cudaStream_t make_stream(Priority priority);
  void destroy_stream(cudaStream_t stream);
  /// Runs this rank's work on a caller's stream, too, until that is released, which waits for the
  /// rank's enqueued work to end.
  void adopt_stream(cudaStream_t stream);
  void release_stream(cudaStream_t stream);
  /// Blocks until this rank's streams are idle, except those being captured.
  void synchronize();

  /// Zero-initialized. Throws DeviceError.
  std::byte* allocate(size_t bytes);
  void free(std::byte* memory, size_t bytes);
  /// Pinned, mapped host memory, uninitialized. Throws DeviceError.
  void* allocate_host(size_t bytes);
  void free_host(void* memory, size_t bytes);
  /// Frees host memory that no enqueued work uses any more, without waiting for a stream.
  void free_idle_host(void* memory, size_t bytes);

 private:
  GpuShare(int device, int sms, void* green);

  int device_, sms_;
  void* green_;  // CUgreenCtx; null: the whole GPU
  cudaStream_t memory_ = nullptr;
  std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
};

/// Share of this thread: the whole current device unless a UseShare set another.
const std::shared_ptr<GpuShare>& this_share();

/// Makes `share` this thread's share while it lives.
class UseShare {
 public:
  explicit UseShare(std::shared_ptr<GpuShare> share);
  ~UseShare();
  UseShare(const UseShare&) = delete;
  UseShare& operator=(const UseShare&) = delete;

 private:
  std::shared_ptr<GpuShare> before_;
};

}  // namespace tandem::gpu
