// Plain collectives by kernels that store into the peers' memory.
//
// one_shot: everything at once, and one wait (one_shot_parts.h). pipelined, for any size: a whole
// is cut into one part a rank (shard_of), a part into chunks; block b of every role handles every
// channels-th chunk. Chunks travel through FIFOs, one for each (lane, channel, source) in the
// destination's memory: the source stores a chunk and counts it as arrived, the destination counts
// it as free when it has been read. Counts go on from call to call, so that calls of every kind and
// size follow each other without a barrier; a channel waits only for its likes.
//
// all_gather: a rank sends its part to all. reduce_scatter: it sends each part to its owner, who
// adds all of them in rank order, in f32, and rounds once. all_reduce: the owner sends the sums on
// through the second lane, while later chunks are still on their way. Each of these roles has
// blocks of its own: on an SM whose stores wait for the wire, loads and signals wait too.
//
// All calls of a communicator share the counts and FIFOs: they follow each other, on one stream or
// ordered by events. A large one fills the GPU with blocks that wait for their likes, so calls of
// two communicators that may run at once are made in the same order on all ranks.
#pragma once

#include <memory>
#include <string_view>

#include "collectives/cuda/one_shot_parts.h"
#include "collectives/cuda/partition.h"
#include "comm/device/gpu_communicator.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

enum class PartWay { one_shot, pipelined };
constexpr std::string_view name_of(PartWay way) {
  return way == PartWay::one_shot ? "one_shot" : "pipelined";
}

class PartExchange {
 public:
  /// Collective; of two ranks or more.
  explicit PartExchange(GpuCommunicator& comm);
  /// Any dtype, any rows; `shard` may be this rank's rows of `out`. All three are enqueued on the
  /// communicator's stream, and fastest where parts begin at multiples of 16 bytes. `op` is what a
  /// Timeout names.
  void all_gather(const Tensor& shard, const Tensor& out, PartWay way, OpId op = OpId::all_gather);
  /// f32, bf16, f16; throws InvalidArgument for others. `shard` may be this rank's rows of `data`.
  void reduce_scatter(const Tensor& data, const Tensor& shard, PartWay way,
                      OpId op = OpId::reduce_scatter);
  /// Pipelined. The same dtypes; `in` may be `out`.
  void all_reduce(const Tensor& in, const Tensor& out);
  /// Whether parts of this whole are small enough.
  bool fits(const Tensor& whole, PartWay way) const;
  /// What was measured to be the faster one.
  PartWay choose(const Tensor& whole) const;

 private:
  /// A block of `threads` threads for each of `roles` roles of a channel; kernels: for aligned
  /// parts and for all others.
  template <typename Kernels>
  void launch(OpId op, const Partition& parts, int roles, int threads,
              const Kernels& kernels) const;

  GpuCommunicator& comm_;
  OneShotParts one_shot_;
  std::shared_ptr<GpuBuffer> fifos_;
  DeviceMemory counts_;
};

/// That of this communicator, made at its first use (collective).
PartExchange& part_exchange(GpuCommunicator& comm);

}  // namespace tandem::gpu
