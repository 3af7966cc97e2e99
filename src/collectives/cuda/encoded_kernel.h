// A collective over a wire format as it is launched.
#pragma once

#include "codec/cuda/wire_job.h"
#include "collectives/cuda/exchange.h"

namespace tandem::gpu {

constexpr int kEncodedThreads = 512;

struct EncodedJob {
  ExchangeJob exchange;  // in, out: the tensors; of an all-gather in is the shard, of a
                         // reduce-scatter out is
  DType dtype;
  float* residual;
  int64_t begins[kMaxGpus + 1];  // of the ranks' shards
  WireJob wires[kMaxGpus];       // of their messages; one shot: [0] is of the whole tensor
};

enum class EncodedOp { one_shot_sum, two_shot_sum, reduce_scatter, all_gather };
using EncodedKernel = void (*)(EncodedJob);

/// By the codec: integers of either kind, symmetric or not, and the small floats.
EncodedKernel integer_kernel(const Wire& wire, EncodedOp op);
EncodedKernel level_kernel(const Wire& wire, EncodedOp op);
EncodedKernel float_kernel(const Wire& wire, EncodedOp op);

}  // namespace tandem::gpu
