// What calls that follow each other gave: their digests are taken on the stream, and the host waits
// once, for all of them.
#pragma once

#include <utility>
#include <vector>

#include "bench/cuda/verify.h"
#include "comm/device/gpu_communicator.h"
#include "tests/gpu/host_copies.h"

namespace tandem::test {

class Digests {
 public:
  /// Of up to `most` outputs. Made before the calls: allocating waits for the device.
  Digests(gpu::GpuCommunicator& comm, size_t most)
      : comm_(comm), sums_(most * sizeof(uint64_t)), most_(most) {}
  void add(const Tensor& out) {
    if (count_ == most_) throw InvalidArgument("digests: expected fewer outputs");
    auto* sums = reinterpret_cast<uint64_t*>(sums_.data());
    gpu::enqueue_digest(out, sums + count_++, comm_.stream());
  }
  /// Of all so far, which it forgets. Blocks.
  std::vector<uint64_t> take() {
    return read<uint64_t>(comm_, sums_.data(), std::exchange(count_, 0));
  }

 private:
  gpu::GpuCommunicator& comm_;
  gpu::DeviceMemory sums_;
  size_t most_, count_ = 0;
};

/// Places for the outputs of calls that follow each other at once, so that what each of them gave
/// can be looked at behind the last one.
class CallsInARow {
 public:
  /// Of up to `most` outputs of up to `bytes` each. Made before the calls, as Digests are.
  CallsInARow(gpu::GpuCommunicator& comm, size_t most, size_t bytes)
      : comm_(comm),
        place_bytes_((bytes + 255) / 256 * 256),
        memory_(most * place_bytes_),
        digests_(comm, most),
        most_(most) {
    poison_all();
  }
  bool full() const { return outs_.size() == most_; }
  /// Where the next call's output goes instead of to `like`. Every byte is 0xff.
  Tensor next(const Tensor& like) {
    if (full()) throw InvalidArgument("calls in a row: expected fewer");
    outs_.push_back(Tensor(memory_.data() + outs_.size() * place_bytes_, like.dtype(),
                           {like.dim(0), like.dim(1)}, like.device()));
    return outs_.back();
  }
  const Tensor& out(size_t call) const { return outs_[call]; }
  /// Of the calls so far, in their order. Blocks.
  std::vector<uint64_t> digests() {
    for (const Tensor& out : outs_) digests_.add(out);
    return digests_.take();
  }
  /// Those are forgotten.
  void begin_again() {
    outs_.clear();
    poison_all();
  }

 private:
  void poison_all() {
    gpu::poison(memory_.view(DType::u8, {int64_t(memory_.bytes())}), comm_.stream());
  }

  gpu::GpuCommunicator& comm_;
  size_t place_bytes_;
  gpu::DeviceMemory memory_;
  Digests digests_;
  std::vector<Tensor> outs_;
  size_t most_;
};

}  // namespace tandem::test
