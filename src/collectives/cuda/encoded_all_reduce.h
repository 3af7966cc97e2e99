// All-reduce over a wire format in one kernel (Flash Communication, arXiv 2412.04964, section 3),
// the CPU's bits (collectives/encoded_all_reduce.cc): on two ranks, or where the whole message is
// small, every rank sends its encoded values to all, and all add the same messages. Otherwise they
// go to the owner of their shard, who adds them in f32 in rank order, his own as they are, and
// sends the encoded sum to all; he keeps what that decodes as.
//
// What is sent is stored into the receivers' memory, never fetched. A thread block of one rank
// exchanges with those of the same number: signals at places that no shape moves, epochs that count
// on in device memory, staging that alternates. So a captured call can be replayed.
#pragma once

#include <memory>

#include "comm/device/gpu_communicator.h"
#include "tandem/codec.h"

namespace tandem::gpu {

class EncodedAllReduce {
 public:
  /// Of up to `max_elements`. Collective. Throws InvalidArgument or Unsupported for a wire or dtype
  /// that GPUs do not have (codec/cuda/encode.h).
  EncodedAllReduce(GpuCommunicator& comm, const Wire& wire, DType dtype, int64_t max_elements);
  int64_t max_elements() const { return max_elements_; }
  /// Enqueued on the communicator's stream. Contiguous device tensors of one size, which may be
  /// one; `residual`: error feedback as of all_reduce (tandem/collectives.h), or nullptr.
  void run(const Tensor& in, const Tensor& out, const Tensor* residual = nullptr);

 private:
  GpuCommunicator& comm_;
  Wire wire_;
  DType dtype_;
  int64_t max_elements_;
  size_t slot_bytes_;
  std::shared_ptr<GpuBuffer> staging_;
  DeviceMemory calls_;  // a CallCounter
};

}  // namespace tandem::gpu
