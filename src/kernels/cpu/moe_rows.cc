#include <algorithm>
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

void add_expert_biases(const Tensor& x, const Tensor& chosen, const Tensor& weights,
                       const Tensor& biases, const Tensor& y) {
  const ScopedSpan span(SpanKind::compute, "moe_biases");
  const int64_t columns = biases.dim(1), top_k = chosen.dim(1);
  cpu::parallel_ranges(x.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* const from = x.as<float>() + row * x.stride(0);
      float* const to = y.as<float>() + row * y.stride(0);
      if (to != from) std::copy_n(from, columns, to);
      for (int64_t i = row * top_k; i < (row + 1) * top_k; ++i) {
        const int32_t expert = chosen.as<int32_t>()[i];
        if (expert < 0) continue;
        add_weighted(biases.as<float>() + expert * columns, weights.as<float>()[i], columns, to);
      }
    }
  });
}

void add_expert_biases_backward(const Tensor& dy, const Tensor& chosen, const Tensor& weights,
                                const Tensor& biases, const Tensor& dweights,
                                const Tensor& dbiases) {
  const ScopedSpan span(SpanKind::compute, "moe_biases_backward");
  const int64_t columns = biases.dim(1), top_k = chosen.dim(1);
  const auto* const experts = chosen.as<int32_t>();
  cpu::with_type(dy.dtype(), "moe_biases_backward", [&]<typename T>(T) {
    const auto row = [&](int64_t i) { return dy.as<T>() + i / top_k * dy.stride(0); };
    cpu::parallel_ranges(dy.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * top_k; i < end * top_k; ++i) {
        if (experts[i] < 0) continue;
        const float* const bias = biases.as<float>() + experts[i] * columns;
        const T* const d = row(i);
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < columns; ++j) dot += cpu::to_f32(d[j]) * bias[j];
        dweights.as<float>()[i] += dot;
      }
    });
    // By columns: each sum has the order of the rows.
    cpu::parallel_ranges(columns, kBlock, [&](int64_t begin, int64_t end) {
      float* const sums = dbiases.as<float>();
      for (int64_t expert = 0; expert < dbiases.dim(0); ++expert) {
        std::fill(sums + expert * columns + begin, sums + expert * columns + end, 0.0f);
      }
      for (int64_t i = 0; i < chosen.elements(); ++i) {
        if (experts[i] < 0) continue;
        const float weight = weights.as<float>()[i];
        const T* const d = row(i);
        float* const sum = sums + experts[i] * columns;
#pragma omp simd
        for (int64_t j = begin; j < end; ++j) sum[j] += weight * cpu::to_f32(d[j]);
      }
    });
  });
}

}  // namespace tandem
