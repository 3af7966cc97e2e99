// GEMM+AR on GPUs: out[M, N] = sum over ranks of x[M, K] x weight^T, + bias, the same bits on every
// rank. Made for decode and small prefill, where the all-reduce's latency is what there is to gain.
// With AddNorm, one_shot and two_shot add the residual and take the norm in the all-reduce's
// kernel; every other way has a kernel for both behind the sum (kernels/cuda/add_norm.h).
#pragma once

#include <vector>

#include "kernels/cuda/scaled_gemm.h"
#include "overlap/cuda/dense.h"

namespace tandem::gpu {

class GemmAr {
 public:
  /// Collective. K may differ by rank.
  GemmAr(NcclCommunicator& comm, const LtContext& lt, const DenseShape& shape,
         Way way = Way::automatic);
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
  /// This rank's partial product alone: what perfect overlap would cost.
  void gemm_only(const Tensor& x, const Tensor& weight, const Tensor* bias = nullptr,
                 const Scales* scales = nullptr);

 private:
  NcclCommunicator& comm_;
  DenseShape shape_;
  ScaledGemm whole_;
  DeviceMemory partial_;  // [m, n]
  AllReduce all_reduce_;
  Way way_;
};

}  // namespace tandem::gpu
