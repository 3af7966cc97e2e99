// Main loop of the hand-written GEMM without communication, in a test kernel.
#include <fmt/format.h>

#include <algorithm>

#include "tests/gemm/cuda/rotated_gemm.h"
#include "tests/overlap/moe/cuda/values.h"

namespace tandem::test {
namespace {

class GemmBlocks : public GpuMoe {};

// Whole numbers, whose sums are exact in f32: a result is rounded once, so every bit is known.
TEST_F(GemmBlocks, AcceptACustomSourceAndSink) {
  struct Case {
    int64_t m, n, k;
    int tiles;
  };
  // m, n and k that end within a pair, a tile and a k-block; then more tiles than clusters.
  for (const Case& c : {Case{256, 256, 256, 0}, Case{128, 8, 264, 0}, Case{640, 520, 328, 2},
                        Case{8192, 1288, 264, 63}}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const std::string what =
          fmt::format("{} x {} x {} {}, rotated by {}", c.m, c.n, c.k, name_of(dtype), c.tiles);
      const std::vector<float> x = whole_numbers(c.m * c.k, 1, 3),
                               weight = whole_numbers(c.n * c.k, 2, 3);
      const auto on_x = to_device(stored(dtype, x)), on_weight = to_device(stored(dtype, weight));
      const auto out = to_device(std::vector<uint16_t>(size_t(c.m * c.n), 0xffff));
      rotated_gemm(dtype, on_x.data(), on_weight.data(), out.data(), c.m, c.n, c.k, c.tiles,
                   stream());
      const auto found = loaded(dtype, to_host<uint16_t>(out, size_t(c.m * c.n)));
      const int64_t rows_apart = std::max<int64_t>(1, c.m / 200);  // stride between the checked
                                                                   // rows
      for (int64_t i = 0; i < c.m; i += rows_apart) {
        const float* const row = x.data() + (i + 128 * c.tiles) % c.m * c.k;
        for (int64_t j = 0; j < c.n; ++j) {
          float sum = 0;
          for (int64_t k = 0; k < c.k; ++k) sum += row[k] * weight[size_t(j * c.k + k)];
          const float expected = loaded(dtype, stored(dtype, std::max(sum, 0.f)));
          ASSERT_EQ(found[size_t(i * c.n + j)], expected) << what << " at " << i << ", " << j;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
