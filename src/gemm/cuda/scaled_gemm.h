// The product that the dense operators are made of: cuBLASLt's, and for e4m3 operands whatever of
// it this GPU and library have. Which way is taken follows from them and the shape alone, so ranks
// with the same shape on the same hardware take the same.
#pragma once

#include <optional>
#include <string_view>

#include "gemm/cuda/gemm_lt.h"

namespace tandem::gpu {

enum class ProductWay {
  library,  ///< cuBLASLt applies the scales and adds the bias
  after,    ///< a kernel of ours does, on cuBLASLt's product in f32
  widened,  ///< the same, and the codes are multiplied as bf16, which holds them exactly
};
constexpr std::string_view name_of(ProductWay way) {
  switch (way) {
    case ProductWay::library:
      return "library";
    case ProductWay::after:
      return "after";
    case ProductWay::widened:
      return "widened";
  }
  return "?";
}

/// out[M, N] = (x scaled)[M, K] x (weight scaled)^T + bias; deterministic. Takes what LtGemm takes,
/// and e4m3 on every GPU.
class ScaledGemm {
 public:
  /// The first way that there is, or the one asked for. Throws Unsupported when there is none.
  ScaledGemm(const LtContext& context, const GemmShape& shape,
             std::optional<ProductWay> only = std::nullopt);

  /// `scales`: as many as the shape's scaling says. Those of the weight are 16-byte aligned.
  void run(const void* x, const void* weight, void* out, const void* bias, cudaStream_t stream,
           const ScalePointers& scales = {}) const;
  ProductWay way() const { return way_; }

 private:
  void find_way(const LtContext& context, std::optional<ProductWay> only);
  bool has(const LtContext& context, ProductWay way);

  GemmShape shape_;
  ProductWay way_ = ProductWay::library;
  std::optional<LtGemm> gemm_;
  DeviceMemory aligned_;     // x's scales, where the caller's begin at an odd row
  DeviceMemory product_;     // f32 [m, n], unless out is
  DeviceMemory x_, weight_;  // widened
};

}  // namespace tandem::gpu
