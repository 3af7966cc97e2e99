// GEMM+AR on GPUs: out[M, N] = sum over ranks of x[M, K] x weight^T, + bias, the same bits on every
// rank. Designed for decode and small prefill, dominated by the all-reduce's latency.
//
// serial_nccl, one_shot, two_shot: cuBLASLt's GEMM, then an all-reduce. fused: one kernel for up to
// 256 rows, whose tiles are exchanged as they finish (fused.h); a candidate for each exchange and
// split along K.
//
// With AddNorm, one_shot and two_shot add the residual and apply the norm in the all-reduce's
// kernel; the others run a kernel for both after the sum (kernels/cuda/add_norm.h).
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "gemm/cuda/scaled_gemm.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gemm_ar/cuda/fused.h"

namespace tandem::gpu {

class GemmAr {
 public:
  /// Collective. K may differ by rank. There are no fused candidates if `strategy` is serial.
  GemmAr(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
         Strategy strategy = Strategy::automatic);
  /// They refer to this object, and enqueue on the communicator's stream. x: [m, k]; out: [m, n].
  const std::vector<Candidate>& candidates() const { return candidates_; }
  /// GEMM algorithm of e4m3 operands.
  GemmAlgorithm gemm_algorithm() const { return whole_.algorithm(); }
  /// Computes only this rank's partial product, whatever `out`: the cost under perfect overlap.
  void gemm_only(const Operands& o);

 private:
  void add_serial(std::string_view name, AllReduceAlgorithm algorithm);
  void add_fused();
  void add_fused(FusedArTile tile, int split, bool two_shot);
  FusedArArgs fused_args(const Operands& o) const;

  GpuCommunicator& comm_;
  OpDesc shape_;
  ScaledGemm whole_;
  DeviceMemory partial_;  // [m, n]
  AllReduce all_reduce_;
  std::unique_ptr<FusedArKernel> kernel_;  // null if the shape does not support `fused`
  ArStaging layout_;
  std::shared_ptr<GpuBuffer> staging_;  // staging of the fused candidates, laid out by `layout_`
  DeviceMemory split_partials_;         // for blocks that share a tile
  DeviceMemory calls_;                  // the fused candidates' CallCounter
  std::vector<Candidate> candidates_;
};

}  // namespace tandem::gpu
