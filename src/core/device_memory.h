// Memory of GPUs, as core/memory.cc and core/exec.cc use it: core/cuda/device_memory.cc, or
// core/no_cuda.cc.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "core/exec.h"

namespace tandem {

/// Zero-initialized, from the calling thread's share of the GPU. Throws DeviceError, and
/// InvalidArgument if `device` is not that share's.
std::shared_ptr<std::byte> allocate_on_gpu(size_t bytes, Device device);
/// Enqueues a copy between any two memories.
void copy_bytes(const Exec& exec, const void* from, void* to, size_t bytes);
/// Throws what the ranks that use the stream find while it does not end: Timeout, Aborted,
/// Mismatch.
void wait_for_stream(const Exec& exec);
/// Bytes of the GPU's memory that are not free.
size_t used_memory(const Exec& exec);
/// Enqueues zeros.
void clear_bytes(const Exec& exec, void* memory, size_t bytes);

/// Event that orders streams.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
  virtual void record(const Exec& exec) = 0;
  virtual void block(const Exec& exec) const = 0;
};
std::unique_ptr<StreamEvent> make_stream_event();

/// Kernels captured from a stream.
class CapturedWork {
 public:
  virtual ~CapturedWork() = default;
  virtual void launch(const Exec& exec) const = 0;
};
/// Whether exec's stream is one of a GPU that CUDA can capture: not the default stream.
bool can_capture(const Exec& exec);
/// Captures what `enqueue` puts on exec's stream, without running it.
std::unique_ptr<CapturedWork> capture(const Exec& exec, const std::function<void()>& enqueue);

/// Pinned host memory from which copies to a GPU are enqueued.
class StagedBytes {
 public:
  virtual ~StagedBytes() = default;
  /// Waits for the copy before, takes the bytes and enqueues their copy.
  virtual void copy(const Exec& exec, const void* from, void* to, size_t bytes) = 0;
};
std::unique_ptr<StagedBytes> make_staged_bytes(size_t max_bytes);

/// Pinned host memory to which a GPU copies on a stream of its own.
class PinnedRange {
 public:
  virtual ~PinnedRange() = default;
  /// Copies enqueued from now on start after all work enqueued on exec's stream so far.
  virtual void begin(const Exec& exec) = 0;
  virtual void copy(const void* from, void* to, size_t bytes) = 0;
  /// The point after all copies enqueued so far.
  virtual void end() = 0;
  /// Work enqueued on exec's stream from now on starts after the last `end`.
  virtual void block(const Exec& exec) const = 0;
  /// Blocks until the last `end`. The rank's own thread. Throws DeviceError, and as wait_for_stream
  /// of the stream of `begin`.
  virtual void wait() const = 0;
  /// Any thread: checks nothing of the ranks, and throws DeviceError only. Ends also when the rank
  /// gives its work up.
  virtual void wait_unchecked() const = 0;
};
/// Pins existing memory; nullptr if ranks share the GPU or the system refuses. To unpin waits for
/// the GPU.
std::unique_ptr<PinnedRange> pin_host_memory(const Exec& exec, void* memory, size_t bytes);

}  // namespace tandem
