// Launch parameters of a collective over a wire format.
#pragma once

#include "codec/cuda/wire_params.h"
#include "collectives/cuda/exchange.h"

namespace tandem::gpu {

constexpr int kEncodedThreads = 512;
// Pipelined thread block: worker warps, and one warp that signals. Two blocks fit an SM, with 128
// registers per thread; one more warp each would leave 96.
constexpr int kPipelineWorkers = 7;
constexpr int kPipelineThreads = 32 * (kPipelineWorkers + 1);
constexpr int kPipelinesPerSm = 2;
constexpr int kMaxPipelineBlocks = 2 * kMaxExchangeBlocks;
/// Signals of an EncodedCollectives: two exchanges of the other kernels, two streams of the
/// pipelined one.
constexpr int kExchangeSignals = 2 * kMaxGpus * kMaxExchangeBlocks;
constexpr int kEncodedSignals = kExchangeSignals + 2 * kMaxGpus * kMaxPipelineBlocks;

struct EncodedParams {
  ExchangeParams
      exchange;  // the tensors; an all-gather's in and a reduce-scatter's out are the shard
  DType dtype;
  float* residual;
  int64_t begins[kMaxGpus + 1];  // first elements of the ranks' shards
  WireParams wires[kMaxGpus];    // message layouts; one shot: [0] is for the whole tensor
  int sum_lag, take_lag;         // lags of a pipelined sum, in tiles
};

enum class EncodedOp { one_shot_sum, two_shot_sum, pipelined_sum, reduce_scatter, all_gather };
/// Family of formats: symmetric integers, asymmetric integers, small floats, and integers of both
/// kinds with a Hadamard rotation or with spikes.
enum class Family { integers, levels, floats, rotated, spiked };
using EncodedKernel = void (*)(EncodedParams);

/// Kernel of a wire of that family. Each has its own source file (encoded_instance.cu.in), since
/// they take long to compile.
template <EncodedOp op, Family family>
EncodedKernel encoded_kernel(const Wire& wire);

}  // namespace tandem::gpu
