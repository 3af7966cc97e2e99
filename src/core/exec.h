// Device and stream of kernels: the calling thread's CPU threads, or a stream of a GPU. Every
// kernel of kernels/ takes one, with tensors of its device; on a GPU a kernel is enqueued and not
// waited for.
#pragma once

#include <cstdint>
#include <memory>

#include "tandem/tensor.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem {

struct Exec {
  Device device;
  CUstream_st* stream = nullptr;  ///< GPUs only

  bool on_gpu() const { return device.kind == DeviceKind::cuda; }
};

/// to = from, contiguous, of one dtype and number of elements; each on the host or on exec's
/// device. Returns once the copy is done, if one is on the host. Throws InvalidArgument.
void copy(const Exec& exec, const Tensor& from, const Tensor& to);
/// Blocks until all work enqueued on exec's stream has ended.
void wait(const Exec& exec);
/// Bytes in use: of exec's GPU, by everything that runs on it, or of this process, at its peak.
int64_t memory_in_use(const Exec& exec);
/// Sets all bytes of a contiguous tensor on exec's device to 0.
void clear(const Exec& exec, const Tensor& tensor);

class StreamEvent;

/// Point in a stream after which work of another one starts. On the host nothing is done.
class Fence {
 public:
  explicit Fence(const Exec& exec);
  ~Fence();
  Fence(Fence&&) noexcept;
  Fence& operator=(Fence&&) noexcept;
  /// The point after all work enqueued on exec's stream so far; replaces the one before.
  void record(const Exec& exec);
  /// Work enqueued on exec's stream from now on starts after the recorded point.
  void await(const Exec& exec) const;

 private:
  std::unique_ptr<StreamEvent> event_;  // nullptr on the host
};

class StagedBytes;

/// Copies to exec's device that are enqueued: the source may change when `run` returns, which waits
/// at most for the copy before.
class Upload {
 public:
  Upload(const Exec& exec, size_t max_bytes);
  ~Upload();
  Upload(Upload&&) noexcept;
  Upload& operator=(Upload&&) noexcept;
  /// As `copy`, from host memory.
  void run(const Exec& exec, const Tensor& from, const Tensor& to);

 private:
  std::unique_ptr<StagedBytes> staged_;  // nullptr on the host
};

}  // namespace tandem
