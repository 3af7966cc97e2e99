// The GEMM of the dense operators: cuBLASLt, with fallbacks for e4m3 scalings that this GPU or
// library lacks. The choice depends only on those two and the shape, so ranks with the same shape
// on the same hardware make the same one.
#pragma once

#include <optional>
#include <string_view>

#include "gemm/cuda/gemm_lt.h"

namespace tandem::gpu {

enum class GemmAlgorithm {
  library,  ///< cuBLASLt applies the scales and adds the bias
  after,    ///< our kernel does, on cuBLASLt's f32 result
  widened,  ///< as `after`, with the codes multiplied as bf16, which holds them exactly
};
constexpr std::string_view name_of(GemmAlgorithm algorithm) {
  switch (algorithm) {
    case GemmAlgorithm::library:
      return "library";
    case GemmAlgorithm::after:
      return "after";
    case GemmAlgorithm::widened:
      return "widened";
  }
  return "?";
}

/// out[M, N] = (x scaled)[M, K] x (weight scaled)^T + bias; deterministic. Arguments as LtGemm, and
/// e4m3 on every GPU.
class ScaledGemm {
 public:
  /// Takes the first algorithm available, or `only`. Throws Unsupported if there is none.
  ScaledGemm(const LtContext& context, const GemmShape& shape,
             std::optional<GemmAlgorithm> only = std::nullopt);

  /// `scales`: as many as the shape's scaling needs. Those of the weight are 16-byte aligned.
  void run(const void* x, const void* weight, void* out, const void* bias, cudaStream_t stream,
           const ScalePointers& scales = {}) const;
  GemmAlgorithm algorithm() const { return algorithm_; }

 private:
  void find_algorithm(const LtContext& context, std::optional<GemmAlgorithm> only);
  bool has(const LtContext& context, GemmAlgorithm algorithm);

  GemmShape shape_;
  GemmAlgorithm algorithm_ = GemmAlgorithm::library;
  std::optional<LtGemm> gemm_;
  DeviceMemory aligned_;     // x's scales, if the caller's are not aligned
  DeviceMemory product_;     // f32 [m, n], unless out is f32
  DeviceMemory x_, weight_;  // widened
};

}  // namespace tandem::gpu
