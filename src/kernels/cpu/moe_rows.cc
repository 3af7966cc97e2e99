#include <array>
#include <cstring>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "kernels/moe.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

constexpr int64_t kBlock = 512;  // columns summed at a time: the sums stay in the L1 cache

template <typename T>
void store(const float* from, int64_t n, T* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = cpu::from_f32<T>(from[i]);
}

template <typename T>
float scale_row(const T* inner, float weight, int64_t n, T* d_act, T* scaled) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < n; ++i) dot += cpu::to_f32(d_act[i]) * cpu::to_f32(inner[i]);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    scaled[i] = cpu::from_f32<T>(weight * cpu::to_f32(inner[i]));
    d_act[i] = cpu::from_f32<T>(weight * cpu::to_f32(d_act[i]));
  }
  return dot;
}

}  // namespace

void copy_to_slots(const std::byte* from, size_t row_bytes, std::span<const MoeUse> uses,
                   std::byte* to) {
  for (const MoeUse& use : uses) std::memcpy(to + size_t(use.slot) * row_bytes, from, row_bytes);
}

void sum_uses(std::span<const MoeUse> uses, const float* y, int64_t columns, bool weighted,
              DType dtype, std::byte* out) {
  cpu::with_type(dtype, "sum_uses", [&]<typename T>(T) {
    std::array<float, kBlock> sums;
    for (int64_t begin = 0; begin < columns; begin += kBlock) {
      const int64_t count = std::min(kBlock, columns - begin);
      std::fill_n(sums.begin(), count, 0.0f);
      for (const MoeUse& use : uses) {
        const float* row = y + use.slot * columns + begin;
        const float weight = weighted ? use.weight : 1.0f;
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) sums[size_t(j)] += weight * row[j];
      }
      store(sums.data(), count, reinterpret_cast<T*>(out) + begin);
    }
  });
}

void sum_partials(std::span<const std::byte* const> partials, DType dtype, int64_t columns,
                  DType out_dtype, std::byte* out) {
  cpu::with_type(dtype, "sum_partials", [&]<typename In>(In) {
    std::array<float, kBlock> sums;
    for (int64_t begin = 0; begin < columns; begin += kBlock) {
      const int64_t count = std::min(kBlock, columns - begin);
      std::fill_n(sums.begin(), count, 0.0f);
      for (const std::byte* partial : partials) {
        const In* row = reinterpret_cast<const In*>(partial) + begin;
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) sums[size_t(j)] += cpu::to_f32(row[j]);
      }
      cpu::with_type(out_dtype, "sum_partials", [&]<typename Out>(Out) {
        store(sums.data(), count, reinterpret_cast<Out*>(out) + begin);
      });
    }
  });
}

void add_weighted(const float* row, float weight, int64_t columns, float* sums) {
  for (int64_t j = 0; j < columns; ++j) sums[j] += weight * row[j];
}

void scale_by_weight(const Tensor& inner, std::span<const float> weights, const Tensor& d_act,
                     const Tensor& scaled, std::span<float> d_gate_weight) {
  const ScopedSpan span(SpanKind::compute, "moe_weights");
  cpu::with_type(inner.dtype(), "scale_by_weight", [&]<typename T>(T) {
    cpu::parallel_ranges(inner.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        d_gate_weight[size_t(i)] =
            scale_row(inner.as<T>() + i * inner.stride(0), weights[size_t(i)], inner.dim(1),
                      d_act.as<T>() + i * d_act.stride(0), scaled.as<T>() + i * scaled.stride(0));
      }
    });
  });
}

}  // namespace tandem
