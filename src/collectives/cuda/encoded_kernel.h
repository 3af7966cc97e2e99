// An all-reduce over a wire format as it is launched.
#pragma once

#include "codec/cuda/wire_job.h"
#include "collectives/cuda/exchange.h"

namespace tandem::gpu {

constexpr int kEncodedThreads = 256;

struct EncodedJob {
  ExchangeJob exchange;  // in, out: the tensors
  DType dtype;
  float* residual;
  int64_t begins[kMaxGpus + 1];  // of the ranks' shards
  WireJob wires[kMaxGpus];       // of their messages; one shot: [0] is of the whole tensor
};

using EncodedKernel = void (*)(EncodedJob);

/// By the codec: integers of either kind, symmetric or not, and the small floats.
EncodedKernel integer_kernel(const Wire& wire, bool one_shot);
EncodedKernel level_kernel(const Wire& wire, bool one_shot);
EncodedKernel float_kernel(const Wire& wire, bool one_shot);

}  // namespace tandem::gpu
