// Shared by the tests of MoE layers on one GPU: values, and copies in stream order.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/handles.h"
#include "overlap/moe/cuda/permute.h"
#include "tandem/cuda.h"
#include "tandem/dtype.h"
#include "tandem/random.h"

namespace tandem::test {

/// Rows of a grouped GEMM's x, and their positions sorted by group.
struct PermutedRows {
  std::vector<int32_t> group;  ///< group of each row
  std::vector<int32_t> at;     ///< position of each row
  gpu::DeviceMemory source;    ///< GroupedArgs's
  const int32_t* source_data() const { return reinterpret_cast<const int32_t*>(source.data()); }
  size_t rows() const { return group.size(); }
};

class GpuMoe : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "needs a GPU";
    stream_.emplace();
  }
  cudaStream_t stream() const { return stream_->get(); }

  template <typename T>
  gpu::DeviceMemory to_device(const std::vector<T>& host) const {
    gpu::DeviceMemory memory(std::max<size_t>(host.size(), 1) * sizeof(T));
    gpu::check(cudaMemcpyAsync(memory.data(), host.data(), host.size() * sizeof(T),
                               cudaMemcpyHostToDevice, stream()),
               "write");
    gpu::check(cudaStreamSynchronize(stream()), "write");
    return memory;
  }
  template <typename T>
  std::vector<T> to_host(const gpu::DeviceMemory& memory, size_t count) const {
    std::vector<T> host(count);
    gpu::check(cudaStreamSynchronize(stream()), "read");
    gpu::check(cudaMemcpyAsync(host.data(), memory.data(), count * sizeof(T),
                               cudaMemcpyDeviceToHost, stream()),
               "read");
    gpu::check(cudaStreamSynchronize(stream()), "read");
    return host;
  }
  /// Rows of each group as in `counts`, in random order; fills the GEMM's table.
  PermutedRows permute(const std::vector<int64_t>& counts, const gpu::GroupedShape& shape,
                       const gpu::GroupedGemm& gemm) const {
    PermutedRows permuted;
    auto& group = permuted.group;
    for (size_t g = 0; g < counts.size(); ++g) {
      group.insert(group.end(), size_t(counts[g]), int32_t(g));
    }
    for (size_t i = group.size(); i > 1; --i) {
      std::swap(group[i - 1], group[philox(7, 1, i)[0] % i]);
    }
    permuted.source = gpu::DeviceMemory(size_t(shape.padded_rows()) * 4);
    const gpu::DeviceMemory experts = to_device(group), counted(counts.size() * 4),
                            positions(group.size() * 4), dropped(4);
    gpu::MoePermutation permutation;
    permutation.experts = reinterpret_cast<int32_t*>(experts.data());
    permutation.routings = int64_t(group.size());
    permutation.groups = permutation.all_experts = shape.groups;
    permutation.counts = reinterpret_cast<int32_t*>(counted.data());
    permutation.source = reinterpret_cast<int32_t*>(permuted.source.data());
    permutation.position = reinterpret_cast<int32_t*>(positions.data());
    permutation.dropped = reinterpret_cast<int32_t*>(dropped.data());
    permutation.tables[0] = gemm.table();
    permutation.table_count = 1;
    gpu::launch_permute(permutation, stream());
    permuted.at = to_host<int32_t>(positions, group.size());
    return permuted;
  }

 private:
  std::optional<gpu::Stream> stream_;
};

inline uint16_t stored(DType dtype, float value) {
  return dtype == DType::bf16 ? BFloat16::from_float(value).bits : Float16::from_float(value).bits;
}
inline float loaded(DType dtype, uint16_t bits) {
  return dtype == DType::bf16 ? BFloat16{bits}.to_float() : Float16{bits}.to_float();
}
inline std::vector<uint16_t> stored(DType dtype, const std::vector<float>& values) {
  std::vector<uint16_t> all(values.size());
  std::ranges::transform(values, all.begin(), [&](float v) { return stored(dtype, v); });
  return all;
}
inline std::vector<float> loaded(DType dtype, const std::vector<uint16_t>& bits) {
  std::vector<float> all(bits.size());
  std::ranges::transform(bits, all.begin(), [&](uint16_t b) { return loaded(dtype, b); });
  return all;
}
inline std::vector<float> random_values(int64_t count, uint64_t stream, float scale) {
  std::vector<float> all(static_cast<size_t>(count));
  for (size_t i = 0; i < all.size(); ++i) all[i] = (2 * uniform(5, stream, i) - 1) * scale;
  return all;
}
/// Whole numbers in [-most, most].
inline std::vector<float> whole_numbers(int64_t count, uint64_t stream, int maximum) {
  std::vector<float> all(static_cast<size_t>(count));
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = float(int(philox(6, stream, i)[0] % uint32_t(2 * maximum + 1)) - maximum);
  }
  return all;
}

/// `roundings`: number of roundings of a result, inner ones weighted less. `about`: typical size of
/// results, for those that are near 0 by chance, as with few sums.
inline void expect_near(const std::vector<double>& expected, const std::vector<float>& found,
                        DType dtype, const std::string& what, double roundings = 1,
                        double about = 0) {
  double largest = 0, squares = 0, error_squares = 0, worst = 0;
  ASSERT_EQ(expected.size(), found.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(double(found[i]) - expected[i]);
    ASSERT_TRUE(std::isfinite(found[i])) << what << " at " << i;
    largest = std::max(largest, std::abs(expected[i]));
    worst = std::max(worst, error);
    squares += std::max(expected[i] * expected[i], about * about);
    error_squares += error * error;
  }
  // Rounded three times: inner activation, the expert's result, the sum.
  const double step = (dtype == DType::bf16 ? 0x1p-8 : 0x1p-11) * roundings;
  EXPECT_LE(worst, 2 * step * std::max(largest, about)) << what;
  EXPECT_LE(std::sqrt(error_squares), step * std::sqrt(squares)) << what;
}

/// Typical gradient of a row's routing weight: a sum over `ffn` terms, for x and gradients up to 1
/// and weights up to 0.1.
inline double dweight_size(int64_t hidden, int64_t ffn) {
  const double size = std::sqrt(double(hidden) / 3 * 0.01 / 3);  // same for gate, up and gradient
  return std::sqrt(double(ffn)) * size * size * size / 2;
}

}  // namespace tandem::test
