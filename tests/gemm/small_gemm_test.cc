#include "gemm/cpu/small_gemm.h"

#include <gtest/gtest.h>

#include "tests/kernels/reference.h"

namespace tandem {
namespace {
using namespace tandem::test;

TEST(SmallGemm, MatchesReferenceForEveryTail) {
  for (const bool transposed : {false, true}) {
    for (const bool accumulate : {false, true}) {
      for (const int64_t n : {16, 48, 64, 80, 176}) {
        for (int64_t m = 0; m <= 14; ++m) {
          const int64_t k = 1 + m * 7 % 33;
          Matrix a(DType::f32, transposed ? k : m, transposed ? m : k), b(DType::f32, k, n, n + 16);
          Matrix c(DType::f32, m, n);
          a.fill("a"), b.fill("b"), c.fill("c");
          Doubles expected = c.values();
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) {
              double& sum = expected[size_t(i * n + j)];
              if (!accumulate) sum = 0;
              for (int64_t p = 0; p < k; ++p) {
                sum += (transposed ? a.get(p, i) : a.get(i, p)) * b.get(p, j);
              }
            }
          }
          cpu::small_gemm(m, n, k, a.tensor.as<float>(), transposed ? 1 : k, transposed ? m : 1,
                          b.tensor.as<float>(), n + 16, c.tensor.as<float>(), n, accumulate);
          EXPECT_LE(relative_error(c.values(), expected), 1e-6) << m << " " << n << " " << k;
        }
      }
    }
  }
}

TEST(SmallGemm, TransposeMovesEveryElement) {
  Matrix from(DType::f32, 48, 32), to(DType::f32, 32, 48, 64);
  from.fill("from");
  cpu::transpose(from.tensor.as<float>(), 32, 48, 32, to.tensor.as<float>(), 64);
  for (int64_t i = 0; i < 48; ++i) {
    for (int64_t j = 0; j < 32; ++j) EXPECT_EQ(to.get(j, i), from.get(i, j));
  }
}

}  // namespace
}  // namespace tandem
