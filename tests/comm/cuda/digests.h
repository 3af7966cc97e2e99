// Digests of the outputs of consecutive calls, computed on the stream; the host waits once for all
// of them.
#pragma once

#include <utility>
#include <vector>

#include "bench/cuda/verify.h"
#include "comm/device/gpu_communicator.h"
#include "tests/comm/cuda/host_copies.h"

namespace tandem::test {

class Digests {
 public:
  /// Holds up to `maximum` digests. Construct it before the calls: allocating waits for the device.
  Digests(gpu::GpuCommunicator& comm, size_t maximum)
      : comm_(comm), sums_(maximum * sizeof(uint64_t)), maximum_(maximum) {}
  void add(const Tensor& out) {
    if (count_ == maximum_) throw InvalidArgument("digests: expected fewer outputs");
    auto* sums = reinterpret_cast<uint64_t*>(sums_.data());
    gpu::enqueue_digest(out, sums + count_++, comm_.stream());
  }
  /// Returns and clears all digests so far. Blocks.
  std::vector<uint64_t> take() {
    return read<uint64_t>(comm_, sums_.data(), std::exchange(count_, 0));
  }

 private:
  gpu::GpuCommunicator& comm_;
  gpu::DeviceMemory sums_;
  size_t maximum_, count_ = 0;
};

/// Output buffers for back-to-back calls, so that each output can be checked after the last call.
class CallsInARow {
 public:
  /// Holds up to `maximum` outputs of up to `bytes` each. Construct it before the calls, as
  /// Digests.
  CallsInARow(gpu::GpuCommunicator& comm, size_t maximum, size_t bytes)
      : comm_(comm),
        slot_bytes_((bytes + 255) / 256 * 256),
        memory_(maximum * slot_bytes_),
        digests_(comm, maximum),
        maximum_(maximum) {
    poison_all();
  }
  bool full() const { return outs_.size() == maximum_; }
  /// Output buffer of the next call, shaped like `like`. Every byte is 0xff.
  Tensor next(const Tensor& like) {
    if (full()) throw InvalidArgument("calls in a row: expected fewer");
    outs_.push_back(Tensor(memory_.data() + outs_.size() * slot_bytes_, like.dtype(),
                           {like.dim(0), like.dim(1)}, like.device()));
    return outs_.back();
  }
  const Tensor& out(size_t call) const { return outs_[call]; }
  /// Digests of the calls so far, in order. Blocks.
  std::vector<uint64_t> digests() {
    for (const Tensor& out : outs_) digests_.add(out);
    return digests_.take();
  }
  /// Discards the outputs and poisons their memory.
  void begin_again() {
    outs_.clear();
    poison_all();
  }

 private:
  void poison_all() {
    gpu::poison(memory_.view(DType::u8, {int64_t(memory_.bytes())}), comm_.stream());
  }

  gpu::GpuCommunicator& comm_;
  size_t slot_bytes_;
  gpu::DeviceMemory memory_;
  Digests digests_;
  std::vector<Tensor> outs_;
  size_t maximum_;
};

}  // namespace tandem::test
