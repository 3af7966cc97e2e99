// Collectives over a wire format, each in one kernel, the CPU's bits (collectives/encoded_*.cc).
//
// all_reduce (Flash Communication, arXiv 2412.04964, section 3): on two ranks, or where the whole
// message is small, every rank sends its encoded values to all, and all add the same messages.
// Otherwise they go to the owner of their shard, who adds them in f32 in rank order, his own as
// they are, and sends the encoded sum to all; he keeps what that decodes as. reduce_scatter is the
// first half of that without encoding the sum, all_gather the second half.
//
// Large all-reduces have tiles of all phases in flight together (encoded_pipeline.cuh). What is
// sent is stored into the receivers' memory, never fetched. A thread block of one rank exchanges
// with those of the same number: signals at places that no shape moves, epochs that count on in
// device memory, staging that alternates. So a captured call can be replayed, and calls of all
// three may follow each other.
#pragma once

#include <memory>

#include "collectives/cuda/encoded_kernel.h"
#include "comm/device/gpu_communicator.h"
#include "tandem/codec.h"

namespace tandem::gpu {

/// Of sums whose shards go to owners: one phase after the other, or tiles of all in flight together
/// (encoded_pipeline.cuh). The same bits.
enum class EncodedSum { chosen, two_shot, pipelined };

class EncodedCollectives {
 public:
  /// For messages of up to `largest` elements: a shard's, or what largest_sum says. Collective.
  /// Throws InvalidArgument or Unsupported for a wire or dtype that GPUs do not have
  /// (codec/cuda/encode.h).
  EncodedCollectives(GpuCommunicator& comm, const Wire& wire, DType dtype, int64_t largest);
  /// Elements of the largest message of an all_reduce.
  static int64_t largest_sum(int64_t elements, int ranks);
  int64_t largest() const { return largest_; }

  /// All are enqueued on the communicator's stream and take contiguous device tensors of the dtype.
  /// `residual`: error feedback as in tandem/collectives.h, or nullptr. `in` may be `out`, and
  /// `shard` this rank's rows of the other tensor.
  void all_reduce(const Tensor& in, const Tensor& out, const Tensor* residual = nullptr,
                  EncodedSum way = EncodedSum::chosen);
  void reduce_scatter(const Tensor& data, const Tensor& shard, const Tensor* residual = nullptr);
  void all_gather(const Tensor& shard, const Tensor& out);

 private:
  EncodedJob job_of(OpId op, const Tensor& in, const Tensor& out, const Tensor* residual) const;
  /// Shards are `rows` of `row` elements.
  void set_shards(EncodedJob& job, int64_t rows, int64_t row) const;
  void launch(EncodedOp op, const EncodedJob& job, int64_t most_blocks);

  GpuCommunicator& comm_;
  Wire wire_;
  DType dtype_;
  int64_t largest_;
  size_t slot_bytes_;
  std::shared_ptr<GpuBuffer> staging_;
  DeviceMemory calls_;  // a CallCounter
};

}  // namespace tandem::gpu
