// The dense operators on GPUs whose rows travel in a wire format: the candidates beside plain ones.
//
// serial: cuBLASLt's product and the collective over the wire format
// (collectives/cuda/encoded_collectives.h), one after the other, two launches. A shard is one
// message, so its groups are those of its rows' own messages where they divide a row. AG+GEMM: all
// ranks use the rows as decoded, their owner too. GEMM+RS: the owner adds its own partial product
// as it is. GEMM+AR: so does the owner of a shard; on two ranks, and in the smallest messages, each
// partial product is encoded once and the sum is not.
#pragma once

#include <memory>
#include <vector>

#include "collectives/cuda/encoded_collectives.h"
#include "gemm/cuda/scaled_gemm.h"
#include "overlap/cuda/dense.h"

namespace tandem::gpu {

class EncodedDense {
 public:
  /// Collective, on more than one rank of one node. Throws InvalidArgument or Unsupported for a
  /// wire, an operator or operands that have no encoded form on GPUs.
  EncodedDense(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape);
  /// Serial first. They are of this object, which must outlive them.
  std::vector<Candidate> candidates();
  /// AG+GEMM: [m, k], as decoded, after a run.
  Tensor gathered() const { return memory_.view(shape_.dtype, {shape_.m, shape_.k}); }
  /// That a rank sends, in all, at a call.
  int64_t wire_bytes() const;

 private:
  void run(const tandem::Operands& o);

  GpuCommunicator& comm_;
  OpDesc shape_;
  ScaledGemm product_;
  DeviceMemory memory_;  // AG: gathered [m, k]; RS, AR: partial [m, n]
  EncodedCollectives collective_;
};

}  // namespace tandem::gpu
