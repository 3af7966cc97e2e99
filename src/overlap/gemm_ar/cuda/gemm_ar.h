// GEMM+AR on GPUs: out[M, N] = sum over ranks of x[M, K] x weight^T, + bias, the same bits on every
// rank. Designed for decode and small prefill, dominated by the all-reduce's latency.
//
// serial_nccl, one_shot, two_shot: cuBLASLt's GEMM, then an all-reduce. fused: one kernel for up to
// 256 rows, whose tiles are exchanged as they finish (fused.h).
//
// With AddNorm, one_shot and two_shot add the residual and apply the norm in the all-reduce's
// kernel; the others run a kernel for both after the sum (kernels/cuda/add_norm.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gemm/cuda/scaled_gemm.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gemm_ar/cuda/fused.h"

namespace tandem::gpu {

class GemmAr {
 public:
  /// Collective. K may differ by rank. The fused algorithm is prepared, and its variants measured,
  /// if `algorithm` is fused or automatic; otherwise the operator does not have it.
  GemmAr(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
         Algorithm algorithm = Algorithm::automatic);
  /// x: [m, k]; out: [m, n]. Enqueues on the communicator's stream.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr, const AddNorm* add_norm = nullptr) {
    run(algorithm_, x, weight, out, bias, scales, add_norm);
  }
  /// Runs the given one of `algorithms()` instead of the chosen one.
  void run(Algorithm algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
           const Tensor* bias = nullptr, const Scales* scales = nullptr,
           const AddNorm* add_norm = nullptr);
  Algorithm algorithm() const { return algorithm_; }
  std::vector<Algorithm> algorithms() const;
  /// GEMM algorithm of e4m3 operands.
  GemmAlgorithm gemm_algorithm() const { return whole_.algorithm(); }
  /// Number of variants; only `fused` has some: its exchanges and splits along K. The fastest is in
  /// use unless `use_variant` selects another.
  int variants(Algorithm algorithm) const {
    return algorithm == Algorithm::fused ? int(fused_.size()) : 0;
  }
  void use_variant(Algorithm algorithm, int variant) { fused_variant_ = known(algorithm, variant); }
  std::string describe(Algorithm algorithm) const {
    return fused_[size_t(known(algorithm, fused_variant_))].name;
  }
  /// Computes only this rank's partial product: the cost under perfect overlap.
  void gemm_only(const Tensor& x, const Tensor& weight, const Tensor* bias = nullptr,
                 const Scales* scales = nullptr);

 private:
  int known(Algorithm algorithm, int variant) const {
    return known_variant("gemm_ar", algorithm, variant, variants(algorithm));
  }
  void make_fused();
  void run_fused(FusedArKernel& kernel, int split, bool two_shot, const Operands& o);

  GpuCommunicator& comm_;
  OpDesc shape_;
  ScaledGemm whole_;
  DeviceMemory partial_;  // [m, n]
  AllReduce all_reduce_;
  std::vector<std::unique_ptr<FusedArKernel>> kernels_;  // at most one
  std::vector<Candidate> fused_;  // empty if the shape does not support `fused`
  int fused_variant_ = 0;
  ArStaging layout_;
  std::shared_ptr<GpuBuffer> staging_;  // staging of the fused algorithm, laid out by `layout_`
  DeviceMemory split_partials_;         // for blocks that share a tile
  DeviceMemory calls_;                  // the fused algorithm's CallCounter
  Algorithm algorithm_;
};

}  // namespace tandem::gpu
