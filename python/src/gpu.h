// GPU ranks as Python has them. A rank's calls are enqueued on its own stream: behind what the
// caller's current stream (PyTorch's, CuPy's) has by then, and what that gets afterwards is behind
// them. So operands are used, and may be freed or written again, as by any operation of the
// framework on that stream. Nothing waits on the host, and a stream that is captured takes the
// calls into its graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "tandem/codec.h"
#include "tandem/communicator.h"
#include "tandem/error.h"
#include "tandem/tensor.h"

namespace tandem::python {

/// A cudaStream_t as frameworks say it: a number.
using StreamNumber = uintptr_t;

/// The GPU of a rank. All may throw DeviceError.
class GpuRank {
 public:
  virtual ~GpuRank() = default;
  virtual int device() const = 0;
  virtual StreamNumber stream() const = 0;
  virtual bool shares_gpu() const = 0;
  /// Around whatever uses the rank: a GpuGuard of this thread's (tandem/cuda.h). They do not nest.
  virtual void enter() = 0;
  virtual void leave() noexcept = 0;
  /// Within: the rank's stream waits for what `callers` has. Throws InvalidArgument naming `what`
  /// for the default stream where ranks share the GPU.
  virtual void follow(StreamNumber callers, std::string_view what) = 0;
  /// Within: `callers` waits for what the rank's stream has.
  virtual void lead(StreamNumber callers) = 0;
  /// Within: on the rank's stream, between device tensors.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  /// Blocks until the rank's stream is empty. Throws Timeout or Aborted where a call gave up.
  virtual void synchronize() = 0;
};

/// nullptr for a CPU rank. Must not outlive `comm`.
std::unique_ptr<GpuRank> gpu_rank_of(Communicator& comm);

/// Whether a graph is captured on that stream.
bool is_captured(StreamNumber stream);

/// As tandem/codec.h's, of device memory, enqueued on `stream`. Throw InvalidArgument, and
/// Unsupported for a codec that GPUs do not have.
void encode_on_gpu(const Wire& wire, const Tensor& values, const Tensor& message,
                   StreamNumber stream);
void decode_on_gpu(const Wire& wire, const Tensor& message, const Tensor& values,
                   StreamNumber stream);

/// Within `GpuRank`, of a call. Of a CPU rank (nullptr) nothing.
class OnRank {
 public:
  explicit OnRank(GpuRank* rank) : rank_(rank) {
    if (rank_) rank_->enter();
  }
  /// The call's work follows what `callers` has; `done` lets that follow the call's.
  OnRank(GpuRank* rank, std::optional<StreamNumber> callers, std::string_view what) : OnRank(rank) {
    if (!rank_ || !callers) return;
    rank_->follow(*callers, what);
    callers_ = callers;
  }
  /// Throws where the destructor could not.
  void done() {
    if (const auto callers = std::exchange(callers_, std::nullopt)) rank_->lead(*callers);
  }
  ~OnRank() {
    try {
      done();  // what a call that failed has enqueued
    } catch (const Error&) {
    }
    if (rank_) rank_->leave();
  }
  OnRank(const OnRank&) = delete;
  OnRank& operator=(const OnRank&) = delete;

 private:
  GpuRank* const rank_;
  std::optional<StreamNumber> callers_;
};

}  // namespace tandem::python
