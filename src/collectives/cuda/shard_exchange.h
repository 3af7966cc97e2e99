// Uncompressed collectives by kernels that store into the peers' memory.
//
// one_shot: all data at once, and one wait (one_shot_shards.h). pipelined, for any size: a tensor
// is split into one shard per rank (shard_of), a shard into chunks; block b of every role handles
// every channels-th chunk. Chunks pass through FIFOs, one for each (lane, channel, source) in the
// destination's memory: the source stores a chunk and counts it as arrived, the destination counts
// it as free once it has read it. Counts continue from call to call, so that calls of every kind
// and size follow each other without a barrier; a channel only waits for the same channel of its
// peers.
//
// all_gather: a rank sends its shard to all. reduce_scatter: it sends each shard to its owner,
// which adds all of them in rank order, in f32, and rounds once. all_reduce: the owner sends the
// sums through the second lane while later chunks are still arriving. Each of these roles has its
// own blocks: on an SM whose stores wait for the link, loads and signals wait, too.
//
// All calls of a communicator share the counts and FIFOs, so they must be ordered, on one stream or
// by events. A large call fills the GPU with blocks that wait for their peers, so calls of two
// communicators that may run concurrently must be made in the same order on all ranks.
#pragma once

#include <memory>
#include <string_view>

#include "collectives/cuda/one_shot_shards.h"
#include "collectives/cuda/partition.h"
#include "comm/device/gpu_communicator.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

enum class ShardAlgorithm { one_shot, pipelined };
constexpr std::string_view name_of(ShardAlgorithm algorithm) {
  return algorithm == ShardAlgorithm::one_shot ? "one_shot" : "pipelined";
}

class ShardExchange {
 public:
  /// Collective; for two ranks or more.
  explicit ShardExchange(GpuCommunicator& comm);
  /// Any dtype, any rows; `shard` may be this rank's rows of `out`. All three are enqueued on the
  /// communicator's stream, and are fastest if shards begin at multiples of 16 bytes. `op`: name in
  /// a Timeout.
  void all_gather(const Tensor& shard, const Tensor& out, ShardAlgorithm algorithm,
                  OpId op = OpId::all_gather);
  /// f32, bf16, f16; throws InvalidArgument for others. `shard` may be this rank's rows of `data`.
  void reduce_scatter(const Tensor& data, const Tensor& shard, ShardAlgorithm algorithm,
                      OpId op = OpId::reduce_scatter);
  /// Pipelined. The same dtypes; `in` may be `out`.
  void all_reduce(const Tensor& in, const Tensor& out);
  /// True if shards of this tensor are small enough.
  bool fits(const Tensor& whole, ShardAlgorithm algorithm) const;
  /// Algorithm that was measured to be faster.
  ShardAlgorithm choose(const Tensor& whole) const;

 private:
  /// Launches a block of `threads` threads for each of `roles` roles of a channel; kernels: for
  /// aligned shards and for all others.
  template <typename Kernels>
  void launch(OpId op, const Partition& shards, int roles, int threads,
              const Kernels& kernels) const;

  GpuCommunicator& comm_;
  OneShotShards one_shot_;
  std::shared_ptr<GpuBuffer> fifos_;
  DeviceMemory counts_;
};

/// ShardExchange of this communicator, created at its first use (collective).
ShardExchange& shard_exchange(GpuCommunicator& comm);

}  // namespace tandem::gpu
