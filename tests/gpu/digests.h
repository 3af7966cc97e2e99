// What calls that follow each other gave: their digests are taken on the stream, and the host waits
// once, for all of them.
#pragma once

#include <utility>
#include <vector>

#include "comm/nccl/nccl_communicator.h"
#include "kernels/cuda/verify.h"
#include "tests/gpu/host_copies.h"

namespace tandem::test {

class Digests {
 public:
  /// Of up to `most` outputs. Made before the calls: allocating waits for the device.
  Digests(gpu::NcclCommunicator& comm, size_t most)
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
  gpu::NcclCommunicator& comm_;
  gpu::DeviceMemory sums_;
  size_t most_, count_ = 0;
};

}  // namespace tandem::test
