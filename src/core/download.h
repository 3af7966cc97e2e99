// Copies of a GPU's memory to the host that run beside the GPU's later work.
#pragma once

#include <cstddef>
#include <memory>

#include "core/exec.h"

namespace tandem {

class PinnedRange;

class Download {
 public:
  /// Pins `memory`, which must outlive this object, if exec's GPU is the rank's alone.
  Download(const Exec& exec, void* memory, size_t bytes);
  ~Download();
  Download(Download&&) noexcept;
  Download& operator=(Download&&) noexcept;

  /// Whether `fetch` only enqueues a copy.
  bool is_enqueued() const { return pinned_ != nullptr; }
  /// Fetches from now on start after all work enqueued on exec's stream so far.
  void begin(const Exec& exec);
  /// Host tensor with the values of `from`: `to`, in the memory, which a GPU's are copied to, or
  /// `from` itself if it is on the host. It must not change before the copy ends: see `block`.
  Tensor fetch(const Exec& exec, const Tensor& from, const Tensor& to);
  /// After the last copy.
  void end();
  /// Work enqueued on exec's stream from now on starts after the copies before `end`.
  void block(const Exec& exec) const;
  /// Blocks until these copies have ended. The rank's own thread. Throws DeviceError, and what the
  /// ranks that use the stream of `begin` find while it does not end.
  void wait() const;
  /// Any thread: throws DeviceError only, and ends also when the rank gives its work up.
  void wait_unchecked() const;

 private:
  std::unique_ptr<PinnedRange> pinned_;  // nullptr on the host, or if it could not be pinned
};

}  // namespace tandem
