// GPU ranks for Python. A rank's calls run on its own stream, after all work already in the
// caller's current stream (PyTorch's, CuPy's) and before any work enqueued there later. So operands
// are used, and may be freed or overwritten, as with any operation of the framework on that stream.
// The host does not wait, and a stream under capture records the calls in its graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "tandem/codec.h"
#include "tandem/communicator.h"
#include "tandem/error.h"
#include "tandem/tensor.h"

namespace tandem::python {

/// cudaStream_t as a number, as frameworks pass it.
using StreamNumber = uintptr_t;

/// Bytes to or from another GPU rank.
struct RankMessage {
  int peer;
  Tensor data;
  bool sends;
};

/// GPU of a rank. All functions may throw DeviceError.
class GpuRank {
 public:
  virtual ~GpuRank() = default;
  virtual int device() const = 0;
  virtual StreamNumber stream() const = 0;
  virtual bool shares_gpu() const = 0;
  /// Brackets every use of the rank: a GpuGuard of this thread (tandem/cuda.h). Not reentrant.
  virtual void enter() = 0;
  virtual void leave() noexcept = 0;
  /// Inside enter/leave: the rank's stream waits for the work in `callers`. Throws InvalidArgument
  /// naming `what` for the default stream if ranks share the GPU.
  virtual void follow(StreamNumber callers, std::string_view what) = 0;
  /// From now on calls run on the stream of their caller instead of the rank's own: `follow` moves
  /// the rank there, after its earlier work.
  virtual void use_callers_stream() = 0;
  /// Inside enter/leave: `callers` waits for the work in the rank's stream.
  virtual void lead(StreamNumber callers) = 0;
  /// Inside enter/leave: copies between device tensors on the rank's stream.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  /// Blocks until the rank's stream is empty. Throws Timeout or Aborted if a call failed so.
  virtual void synchronize() = 0;
  /// Throws as `synchronize` if a call has failed so far, without blocking.
  virtual void check() = 0;
  /// Inside enter/leave: sends and receives all `messages` concurrently. Throws InvalidArgument for
  /// a peer that is no rank.
  virtual void exchange(std::span<const RankMessage> messages) = 0;
};

/// nullptr for a CPU rank. Must not outlive `comm`.
std::unique_ptr<GpuRank> gpu_rank_of(Communicator& comm);

/// True if that stream is being captured.
bool is_captured(StreamNumber stream);

/// As in tandem/codec.h, for device memory, enqueued on `stream`. Throw InvalidArgument, or
/// Unsupported for a codec without a GPU implementation.
void encode_on_gpu(const Wire& wire, const Tensor& values, const Tensor& message,
                   StreamNumber stream);
void decode_on_gpu(const Wire& wire, const Tensor& message, const Tensor& values,
                   StreamNumber stream);

/// Scoped `GpuRank::enter` and `leave` around a call. No-op for a CPU rank (nullptr).
class OnRank {
 public:
  explicit OnRank(GpuRank* rank) : rank_(rank) {
    if (rank_) rank_->enter();
  }
  /// Orders the call's work after `callers`; `done` orders `callers` after the call.
  OnRank(GpuRank* rank, std::optional<StreamNumber> callers, std::string_view what) : OnRank(rank) {
    if (!rank_ || !callers) return;
    rank_->follow(*callers, what);
    callers_ = callers;
  }
  /// Throws, unlike the destructor.
  void done() {
    if (const auto callers = std::exchange(callers_, std::nullopt)) rank_->lead(*callers);
  }
  ~OnRank() {
    try {
      done();  // work enqueued by a failed call
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
