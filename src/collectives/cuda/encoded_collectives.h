// Collectives over a wire format, each in one kernel, bit-identical to the CPU
// (collectives/encoded_*.cc).
//
// all_reduce (Flash Communication, arXiv 2412.04964, section 3): with two ranks, or if the whole
// message is small, every rank sends its encoded values to all, and all add the same messages.
// Otherwise they are sent to the owner of their shard, which adds them in f32 in rank order, its
// own uncompressed, and sends the encoded sum to all; it keeps the decoded form of that message.
// reduce_scatter is the first half of that without encoding the sum, all_gather the second half.
//
// Large all-reduces have tiles of all phases in flight together (encoded_pipeline.cuh). Data is
// always stored into the receivers' memory, never fetched. A thread block of one rank exchanges
// with those of the same index: signal positions do not depend on the shape, epochs count up in
// device memory, and staging alternates. So a captured call can be replayed, and calls of all three
// may follow each other.
#pragma once

#include <memory>

#include "collectives/cuda/encoded_kernel.h"
#include "comm/device/gpu_communicator.h"
#include "tandem/codec.h"

namespace tandem::gpu {

/// Algorithm of sums by shard owners: phases one after the other, or with tiles of all phases in
/// flight together (encoded_pipeline.cuh). Same bits.
enum class EncodedSum { chosen, two_shot, pipelined };

class EncodedCollectives {
 public:
  /// Supports messages of up to `largest` elements: those of a shard, or as given by largest_sum.
  /// Collective. Throws InvalidArgument or Unsupported for a wire or dtype that GPUs do not support
  /// (codec/cuda/encode.h).
  EncodedCollectives(GpuCommunicator& comm, const Wire& wire, DType dtype, int64_t largest);
  /// Elements of the largest message of an all_reduce.
  static int64_t largest_sum(int64_t elements, int ranks);
  int64_t largest() const { return largest_; }

  /// The calls are enqueued on the communicator's stream and take contiguous device tensors of the
  /// dtype. `residual`: error feedback as in tandem/collectives.h, or null. `in` may be `out`, and
  /// `shard` may be this rank's rows of the other tensor.
  void all_reduce(const Tensor& in, const Tensor& out, const Tensor* residual = nullptr,
                  EncodedSum algorithm = EncodedSum::chosen);
  void reduce_scatter(const Tensor& data, const Tensor& shard, const Tensor* residual = nullptr);
  void all_gather(const Tensor& shard, const Tensor& out);

 private:
  EncodedParams make_params(OpId op, const Tensor& in, const Tensor& out,
                            const Tensor* residual) const;
  /// Sets shards of `rows` rows of `row` elements in total.
  void set_shards(EncodedParams& params, int64_t rows, int64_t row) const;
  void launch(EncodedOp op, const EncodedParams& params, int64_t max_blocks);

  GpuCommunicator& comm_;
  Wire wire_;
  DType dtype_;
  int64_t largest_;
  size_t slot_bytes_;
  std::shared_ptr<GpuBuffer> staging_;
  DeviceMemory calls_;  // a CallCounter
};

}  // namespace tandem::gpu
