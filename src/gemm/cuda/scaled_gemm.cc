#include "gemm/cuda/scaled_gemm.h"

#include <fmt/format.h>

#include "gemm/cuda/scale.h"

namespace tandem::gpu {

ScaledGemm::ScaledGemm(const LtContext& context, const GemmShape& shape,
                       std::optional<GemmAlgorithm> only)
    : shape_(shape) {
  if (shape.in != DType::e4m3) {
    gemm_.emplace(context, shape);
    return;
  }
  find_algorithm(context, only);
  if (algorithm_ == GemmAlgorithm::library) {
    aligned_ = DeviceMemory(shape.scaling == Scaling::row ? size_t(shape.m) * sizeof(float) : 0);
    return;
  }
  if (shape.out != DType::f32) product_ = DeviceMemory(size_t(shape.m * shape.n) * sizeof(float));
  if (algorithm_ == GemmAlgorithm::widened) {
    x_ = DeviceMemory(size_t(shape.m * shape.k) * size_of(DType::bf16));
    weight_ = DeviceMemory(size_t(shape.n * shape.k) * size_of(DType::bf16));
  }
}

void ScaledGemm::find_algorithm(const LtContext& context, std::optional<GemmAlgorithm> only) {
  for (const GemmAlgorithm algorithm :
       {GemmAlgorithm::library, GemmAlgorithm::after, GemmAlgorithm::widened}) {
    if ((only && *only != algorithm) || !has(context, algorithm)) continue;
    algorithm_ = algorithm;
    return;
  }
  throw Unsupported(fmt::format("gemm: e4m3 M {} N {} K {} to {}: this GPU has no product for it",
                                shape_.m, shape_.n, shape_.k, name_of(shape_.out)));
}

bool ScaledGemm::has(const LtContext& context, GemmAlgorithm algorithm) {
  if (shape_.accumulate && algorithm != GemmAlgorithm::library) return false;
  GemmShape inner = shape_;
  if (algorithm != GemmAlgorithm::library) {
    inner.out = DType::f32;
    inner.bias = false;
    inner.scaling = std::nullopt;
    if (algorithm == GemmAlgorithm::widened) inner.in = DType::bf16;
  }
  try {
    gemm_.emplace(context, inner);
  } catch (const Unsupported&) {
    return false;
  }
  return true;
}

void ScaledGemm::run(const void* x, const void* weight, void* out, const void* bias,
                     cudaStream_t stream, const ScalePointers& scales) const {
  if (shape_.m == 0 || shape_.n == 0) return;
  const bool by_row = shape_.scaling == Scaling::row;
  if (algorithm_ == GemmAlgorithm::library) {
    ScalePointers given = scales;
    if (by_row && reinterpret_cast<uintptr_t>(scales.x) % 16 != 0) {
      check(cudaMemcpyAsync(aligned_.data(), scales.x, aligned_.bytes(), cudaMemcpyDefault, stream),
            "align the scales");
      given.x = reinterpret_cast<const float*>(aligned_.data());
    }
    return gemm_->run(x, weight, out, bias, stream, given);
  }
  if (algorithm_ == GemmAlgorithm::widened) {
    launch_widen(x, x_.data(), shape_.m * shape_.k, stream);
    launch_widen(weight, weight_.data(), shape_.n * shape_.k, stream);
    x = x_.data();
    weight = weight_.data();
  }
  void* product = shape_.out == DType::f32 ? out : product_.data();
  gemm_->run(x, weight, product, nullptr, stream);
  launch_scale({static_cast<const float*>(product), out, shape_.out, shape_.m, shape_.n, scales.x,
                scales.weight, by_row, bias},
               stream);
}

}  // namespace tandem::gpu
