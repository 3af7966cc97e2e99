// Copies to host memory that are enqueued on a GPU's stream.
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

  /// Whether `run` only enqueues a copy.
  bool is_enqueued() const { return pinned_ != nullptr; }
  /// As `copy`, to a tensor in the memory.
  void run(const Exec& exec, const Tensor& from, const Tensor& to);
  /// Blocks until all copies have ended. Any thread. Throws DeviceError.
  void wait() const;

 private:
  std::unique_ptr<PinnedRange> pinned_;  // nullptr on the host, or if it could not be pinned
};

}  // namespace tandem
