// The part of a GPU that a rank has: all of it, or, where several ranks share one, SMs of its own
// (a green context). Like CUDA's current device it belongs to the thread: streams, device memory
// and grids of a rank are made from the share that its thread has.
//
// Where ranks share a GPU, some calls would wait for all of its kernels, those of other ranks, too,
// which may wait for this one: cudaFree, cudaFreeHost, cudaDeviceSynchronize, cublasLtDestroy. A
// share that is not alone does without them: memory comes from the device's pool in the order of a
// stream, and what cannot be freed in time is kept for the next that asks.
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
  /// All that this thread may use of `device`: the SMs that its context or MPS leaves it.
  static std::shared_ptr<GpuShare> whole(int device);
  /// One of `parts` shares of `device`, equal and disjoint. They are made once in a process. Throws
  /// Unsupported where the driver knows no green contexts or the GPU has too few SMs.
  static std::shared_ptr<GpuShare> part(int device, int parts, int index);
  ~GpuShare();
  GpuShare(const GpuShare&) = delete;
  GpuShare& operator=(const GpuShare&) = delete;

  int device() const { return device_; }
  /// Whether no other rank of this process has SMs of the same GPU.
  bool alone() const { return !green_; }
  /// Tells the places apart that kernels are loaded for: the device, or a green context of it.
  const void* place() const { return green_; }
  /// SMs that a grid may count on; all ranks of a world count on as many.
  int sms() const { return sms_; }
  void limit_sms(int sms) { sms_ = sms < sms_ ? sms : sms_; }
  /// Blocks of a kernel that is made for `most` on a whole GPU and of which an SM holds `per_sm`.
  int blocks(int most, int per_sm = 1) const;
  /// Clusters of `size` blocks, an SM each, that are resident at once; `on_device`: what the
  /// occupancy query says of the whole GPU.
  int clusters(int on_device, int size) const;

  cudaStream_t make_stream(Priority priority);
  void destroy_stream(cudaStream_t stream);
  /// This rank's work goes on a caller's stream, too, until that is released: when its work that
  /// is enqueued has ended.
  void adopt_stream(cudaStream_t stream);
  void release_stream(cudaStream_t stream);
  /// Blocks until this rank's streams are empty, but for those that are captured.
  void synchronize();

  /// Zeroed. Throws DeviceError.
  std::byte* allocate(size_t bytes);
  void free(std::byte* memory, size_t bytes);
  /// Pinned, mapped host memory, not cleared. Throws DeviceError.
  void* allocate_host(size_t bytes);
  void free_host(void* memory, size_t bytes);
  /// The same of memory that nothing enqueued uses any more: waits for no stream.
  void free_idle_host(void* memory, size_t bytes);

 private:
  GpuShare(int device, int sms, void* green);

  int device_, sms_;
  void* green_;  // a CUgreenCtx; none: the whole GPU
  cudaStream_t memory_ = nullptr;
  std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
};

/// This thread's; the whole of the current device unless a UseShare gave another.
const std::shared_ptr<GpuShare>& this_share();

/// `share` is this thread's as long as this lives.
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
