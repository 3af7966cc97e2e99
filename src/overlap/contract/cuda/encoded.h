// The dense operators on GPUs whose rows travel in a wire format: the candidates beside plain ones.
//
// serial: cuBLASLt's product and the collective over the wire format
// (collectives/cuda/encoded_collectives.h), one after the other, two launches. A shard is one
// message, so its groups are those of its rows' own messages where they divide a row. AG+GEMM: all
// ranks use the rows as decoded, their owner too. GEMM+RS: the owner adds its own partial product
// as it is. GEMM+AR: so does the owner of a shard; on two ranks, and in the smallest messages, each
// partial product is encoded once and the sum is not.
//
// fused: one kernel. GEMM+RS: tiles are encoded where they are computed and decoded where they are
// added (gemm_rs/cuda/encoded.h). GEMM+AR: the same, and then the sums, rounded, are gathered over
// the wire format by a kernel of their own. AG+GEMM: couriers encode the local shard and decode the
// others' (ag_gemm/cuda/encoded_ag.h); the owner uses its rows as they are, so there is no
// keep_gathered. In bf16, of int8, int4 and int4:g32, with weight [N, K], no bias, K from 512 on
// and M a multiple of 256 x ranks (AG+GEMM: K one of 128; M of 128 x ranks where these are even in
// number); not on an emulated link, which does not hold up what kernels store. Other formats and
// shapes are serial.
#pragma once

#include <memory>
#include <vector>

#include "collectives/cuda/encoded_collectives.h"
#include "gemm/cuda/scaled_gemm.h"
#include "overlap/ag_gemm/cuda/encoded_ag.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gemm_rs/cuda/encoded_rs.h"

namespace tandem::gpu {

class EncodedDense {
 public:
  /// Collective, on more than one rank of one node. Throws InvalidArgument or Unsupported for a
  /// wire, an operator or operands that have no encoded form on GPUs.
  EncodedDense(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
               bool prepares_fused);
  /// Serial first. They are of this object, which must outlive them.
  std::vector<Candidate> candidates();
  /// AG+GEMM: [m, k], as decoded, after a run.
  Tensor gathered() const { return memory_.view(shape_.dtype, {shape_.m, shape_.k}); }
  /// That a rank sends, in all, at a call.
  int64_t wire_bytes() const;

 private:
  void check(const tandem::Operands& o) const;
  void run_serial(const tandem::Operands& o);
  template <typename Run>
  void run_fused(const tandem::Operands& o, const Run& run);
  void run_fused_sum(bool between, const tandem::Operands& o);

  GpuCommunicator& comm_;
  OpDesc shape_;
  ScaledGemm product_;
  DeviceMemory memory_;  // AG: gathered [m, k]; RS, AR: partial [m, n]
  EncodedCollectives collective_;
  std::unique_ptr<EncodedRsOp> fused_rs_;  // none where there is no such kernel
  std::unique_ptr<EncodedAgOp> fused_ag_;
};

}  // namespace tandem::gpu
