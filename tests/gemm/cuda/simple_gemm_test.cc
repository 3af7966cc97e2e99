// Fallback kernel for GEMMs that cuBLASLt has no algorithm for: every layout and dtype.
#include "gemm/cuda/simple_gemm.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bench/cuda/verify.h"
#include "core/cuda/fill.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/matrix.h"

namespace tandem::test {
namespace {

using namespace gpu;

TEST(SimpleGemm, EveryLayoutMatchesReference) {
  if (!has_gpus_for(1)) GTEST_SKIP() << "needs a GPU";
  const Stream local;
  const cudaStream_t stream = local.get();
  for (const DType in : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType to : {in, DType::f32}) {
      for (const bool km : {false, true}) {
        for (const bool kn : {false, true}) {
          for (const auto& [m, n, k] :
               {std::tuple<int64_t, int64_t, int64_t>{126, 264, 520}, {8, 8, 8}, {200, 72, 40}}) {
            const GemmShape shape{
                .m = m, .n = n, .k = k, .in = in, .out = to, .weight_is_kn = kn, .x_is_km = km};
            const Matrix x(in, km ? k : m, km ? m : k), weight(in, kn ? k : n, kn ? n : k),
                out(to, m, n);
            fill_uniform(x.tensor, 5, 100, 0, stream);
            fill_uniform(weight.tensor, 5, 200, 0, stream);
            launch_simple_gemm(shape, x.tensor.data(), weight.tensor.data(), out.tensor.data(),
                               nullptr, stream);
            const Verdict verdict = verify_product(out.tensor,
                                                   {.seed = 5,
                                                    .x_stream = 100,
                                                    .w_stream = 200,
                                                    .terms = 1,
                                                    .k = k,
                                                    .first_row = 0,
                                                    .dtype = in,
                                                    .x_is_km = km,
                                                    .w_is_kn = kn},
                                                   10000, stream);
            EXPECT_LE(verdict.of_bound, 1)
                << fmt::format("{} x {} x {} {} to {}{}{}", m, n, k, name_of(in), name_of(to),
                               km ? " km" : "", kn ? " kn" : "");
            EXPECT_EQ(verdict.not_finite, 0);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::test
