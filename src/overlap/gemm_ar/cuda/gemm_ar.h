// GEMM+AR on GPUs: out[M, N] = sum over ranks of x[M, K] x weight^T, + bias, the same bits on every
// rank. Made for decode and small prefill, where the all-reduce's latency is what there is to gain.
//
// serial_nccl, one_shot, two_shot: cuBLASLt's product, then an all-reduce. fused: one kernel for up
// to 256 rows, whose tiles are exchanged as they are finished (fused.h).
//
// With AddNorm, one_shot and two_shot add the residual and take the norm in the all-reduce's
// kernel; every other way has a kernel for both behind the sum (kernels/cuda/add_norm.h).
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
  /// Collective. K may differ by rank. The fused way is prepared, and its variants measured, where
  /// `way` is fused or automatic; made with another way, the operator has none.
  GemmAr(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape, Way way = Way::automatic);
  /// x: [m, k]; out: [m, n]. Enqueues on the communicator's stream.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr, const AddNorm* add_norm = nullptr) {
    run(way_, x, weight, out, bias, scales, add_norm);
  }
  /// The same by one of `ways()`, whatever was chosen.
  void run(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
           const Tensor* bias = nullptr, const Scales* scales = nullptr,
           const AddNorm* add_norm = nullptr);
  Way way() const { return way_; }
  std::vector<Way> ways() const;
  /// How e4m3 operands are multiplied.
  ProductWay product_way() const { return whole_.way(); }
  /// Only `fused` has variants: its exchanges and splits along K. The fastest is in use unless
  /// another is asked for.
  int variants(Way way) const { return way == Way::fused ? int(variants_.size()) : 0; }
  void use_variant(Way way, int variant) { fused_variant_ = known(way, variant); }
  std::string describe(Way way) const { return variants_[size_t(known(way, fused_variant_))].name; }
  /// This rank's partial product alone: what perfect overlap would cost.
  void gemm_only(const Tensor& x, const Tensor& weight, const Tensor* bias = nullptr,
                 const Scales* scales = nullptr);

 private:
  struct Variant {
    FusedArKernel* kernel;
    int split;
    bool two_shot;
    std::string name;
  };
  int known(Way way, int variant) const {
    return known_variant("gemm_ar", way, variant, variants(way));
  }
  void make_fused();
  void run_fused(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
                 const Scales* scales);

  GpuCommunicator& comm_;
  OpDesc shape_;
  ScaledGemm whole_;
  DeviceMemory partial_;  // [m, n]
  AllReduce all_reduce_;
  std::vector<std::unique_ptr<FusedArKernel>> kernels_;  // one, or none
  std::vector<Variant> variants_;                        // none where the shape has no fused way
  int fused_variant_ = 0;
  ArStaging layout_;
  std::shared_ptr<GpuBuffer> staging_;  // of the fused way, laid out by `layout_`
  DeviceMemory split_partials_;         // between its blocks, where some share a tile
  DeviceMemory calls_;                  // its CallCounter
  Way way_;
};

}  // namespace tandem::gpu
