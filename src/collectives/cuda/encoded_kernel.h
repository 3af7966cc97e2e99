// A collective over a wire format as it is launched.
#pragma once

#include "codec/cuda/wire_job.h"
#include "collectives/cuda/exchange.h"

namespace tandem::gpu {

constexpr int kEncodedThreads = 512;
// A pipelined thread block: workers, and one warp that signals. Two of them fit an SM, with 128
// registers a thread; one more warp each would leave 96.
constexpr int kPipelineWorkers = 7;
constexpr int kPipelineThreads = 32 * (kPipelineWorkers + 1);
constexpr int kPipelinesPerSm = 2;
constexpr int kMaxPipelineBlocks = 2 * kMaxExchangeBlocks;
/// Signals of an EncodedCollectives: two exchanges of the others, two streams of pipelined ones.
constexpr int kExchangeSignals = 2 * kMaxGpus * kMaxExchangeBlocks;
constexpr int kEncodedSignals = kExchangeSignals + 2 * kMaxGpus * kMaxPipelineBlocks;

struct EncodedJob {
  ExchangeJob exchange;  // in, out: the tensors; of an all-gather in is the shard, of a
                         // reduce-scatter out is
  DType dtype;
  float* residual;
  int64_t begins[kMaxGpus + 1];  // of the ranks' shards
  WireJob wires[kMaxGpus];       // of their messages; one shot: [0] is of the whole tensor
  int sum_lag, take_lag;         // of a pipelined sum, in tiles
};

enum class EncodedOp { one_shot_sum, two_shot_sum, pipelined_sum, reduce_scatter, all_gather };
/// Of formats: integers, symmetric or not, the small floats, and integers of both kinds with a
/// Hadamard rotation or with spikes.
enum class Family { integers, levels, floats, rotated, spiked };
using EncodedKernel = void (*)(EncodedJob);

/// The kernel of a wire of that family. Each has a source file (encoded_instance.cu.in), since they
/// take long to compile.
template <EncodedOp op, Family family>
EncodedKernel encoded_kernel(const Wire& wire);

}  // namespace tandem::gpu
