// A GEMM of the weight gradient on a GPU: dw (+)= dy^T x over some rows, in f32.
#pragma once

#include "gemm/cuda/gemm_lt.h"
#include "overlap/contract/cuda/dense.h"

namespace tandem::gpu {

/// shape.weight_kn: dw is stored [K, N]; then x and dy are swapped.
class WgradGemm {
 public:
  WgradGemm(const LtContext& lt, const OpDesc& shape, int64_t rows)
      : swapped_(shape.weight_kn), gemm_(lt, gemm_shape(shape, rows)) {}
  /// x: [rows, k]; dy: [rows, n], of which there may be none. Without `accumulate` dw is replaced,
  /// with the bits of a sum that begins at 0.
  void run(const void* x, const void* dy, void* dw, bool accumulate, cudaStream_t stream) const {
    const void *left = swapped_ ? x : dy, *right = swapped_ ? dy : x;
    if (!accumulate) return gemm_.store(left, right, dw, stream);
    gemm_.run(left, right, dw, nullptr, stream);
  }

 private:
  static GemmShape gemm_shape(const OpDesc& s, int64_t rows) {
    return {.m = s.weight_kn ? s.k : s.n,
            .n = s.weight_kn ? s.n : s.k,
            .k = rows,
            .in = s.dtype,
            .out = DType::f32,
            .weight_is_kn = true,
            .x_is_km = true,
            .accumulate = true};
  }

  bool swapped_;
  LtGemm gemm_;
};

}  // namespace tandem::gpu
