// Candidates of the dense operators on GPUs that send rows in a wire format, in addition to the
// uncompressed ones.
//
// serial: cuBLASLt's GEMM and the collective in the wire format
// (collectives/cuda/encoded_collectives.h), one after the other, two launches. A shard is one
// message, so its groups equal those of per-row messages if they divide a row. AG+GEMM: all ranks,
// including the owner, use the decoded rows. GEMM+RS: the owner adds its local partial product
// uncompressed. GEMM+AR: the owner of a shard does the same; with two ranks, and in the smallest
// messages, each partial product is encoded once and the sum is not.
//
// fused: one kernel (FusedEncoded). GEMM+RS: tiles are encoded where they are computed and decoded
// where they are added (scatter/cuda/encoded.h). GEMM+AR: the same, then a separate kernel gathers
// the rounded sums in the wire format. AG+GEMM: copy warps encode the local shard and decode the
// remote ones (ag_gemm/cuda/encoded_ag.h); the owner uses its rows uncompressed, so keep_gathered
// is not supported. Requires bf16, int8, int4 or int4:g32, weight [N, K], no bias, K >= 512 and M a
// multiple of 256 x ranks (AG+GEMM: K a multiple of 128; M of 128 x ranks if the number of ranks is
// even); not on an emulated link, which does not delay what kernels store. Other formats and shapes
// are serial.
#pragma once

#include <memory>
#include <vector>

#include "collectives/cuda/encoded_collectives.h"
#include "gemm/cuda/scaled_gemm.h"
#include "overlap/contract/cuda/dense.h"

namespace tandem::gpu {

/// An operator's kernel that sends rows in a wire format.
class FusedEncoded {
 public:
  virtual ~FusedEncoded() = default;
  /// Candidates whose names begin with "fused". They refer to this object and only enqueue.
  /// `out` of operators that sum over ranks: the local shard's rows.
  virtual std::vector<Candidate> candidates() = 0;
};
/// Collective: null on every rank if the GPUs, the shape or the wire format have no such kernel.
using MakeFusedEncoded = std::unique_ptr<FusedEncoded> (*)(GpuCommunicator& comm,
                                                           const OpDesc& shape);

class EncodedDense {
 public:
  /// Collective, on more than one rank of one node. Throws InvalidArgument or Unsupported for a
  /// wire format, an operator or operands that have no encoded form on GPUs. `make_fused`: null for
  /// serial candidates only.
  EncodedDense(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
               MakeFusedEncoded make_fused);
  /// Candidates, serial first; a fused one that cannot run says why. They refer to this object,
  /// which must outlive them.
  std::vector<Candidate> candidates();
  /// AG+GEMM: [m, k], as decoded, after a run.
  Tensor gathered() const { return memory_.view(shape_.dtype, {shape_.m, shape_.k}); }
  /// Total bytes that a rank sends per call.
  int64_t wire_bytes() const;

 private:
  void run_serial(const Operands& o);
  void run_fused(const Candidate& fused, const Operands& o);

  GpuCommunicator& comm_;
  OpDesc shape_;
  ScaledGemm product_;
  DeviceMemory memory_;  // AG: gathered [m, k]; RS, AR: partial [m, n]
  EncodedCollectives collective_;
  std::unique_ptr<FusedEncoded> fused_;  // null if there is no such kernel
};

}  // namespace tandem::gpu
