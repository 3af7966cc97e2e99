// e4m3 operands in the hand-written kernels: fused AG+GEMM, and the fused GEMM+RS that adds
// arriving partial sums.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "comm/device/signal_kernels.h"
#include "core/system/env.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/random.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/exact_product.h"
#include "tests/overlap/cuda/scaled_operands.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Fp8Fused : public OnGpus {};

/// Product of the operands for all candidates, each of which takes less time than its computation.
ExactProduct exact_product(GpuCommunicator& comm, const ScaledOperands& o) {
  ProductReference reference = o.reference;
  reference.roundings = roundings_of("chunked", reference.terms);
  return ExactProduct(reference, o.out.tensor.dim(0), o.out.tensor.dim(1), o.out.tensor.dtype(),
                      comm.stream());
}

// One column of tiles and many, shards of one row of tiles, N and K that end within a tile and a
// k-step, last waves with several splits, and K so long that sums kept in the tensor cores
// throughout would exceed the bound. Two sets of operands alternate, then only the scales move:
// using those of another tile or call would fail.
TEST_P(Fp8Fused, EveryHandWrittenCandidateMatchesReferenceUnderRandomDelays) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const auto try_candidates = [&](const auto& op, const std::vector<ScaledOperands>& sets,
                                    const std::vector<ExactProduct>& exact,
                                    const std::string& name) {
      const auto fused = candidates_of(op, "fused");
      ASSERT_GT(fused.size(), 0u) << name;
      const Candidate chunked = candidate_of(op, "chunked");
      for (const Candidate& candidate : fused) {
        const std::string what = fmt::format("{} {} of {}", name, candidate.name, comm.size());
        const auto call = [&](const Candidate& one, const ScaledOperands& o, const Scales& scales) {
          poison(o.out.tensor, comm.stream());
          one.run({o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, &scales});
        };
        std::vector<uint64_t> digests[2];
        for (uint64_t i = 0; i < 8; ++i) {
          const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
          if (delay < 20000) launch_pause(delay, comm.stream());
          const ScaledOperands& o = sets[i % 2];
          if (i == 5) call(chunked, o, o.scales);
          call(candidate, o, o.scales);
          digests[i % 2].push_back(digest(o.out.tensor, comm.stream()));
        }
        for (const size_t set : {0, 1}) {
          comm.synchronize();
          const Verdict verdict = exact[set].verify(sets[set].out.tensor, comm.stream());
          EXPECT_LE(verdict.of_bound, 1) << what;
          EXPECT_EQ(verdict.not_finite, 0) << what;
          if (sets[set].reference.k == 512) expect_right(comm, sets[set], what);  // checks `exact`
          EXPECT_EQ(digests[set], std::vector<uint64_t>(4, digests[set][0])) << what;
        }
        const ScaledOperands& o = sets[1];
        const MovedScales moved(comm, o.scales);
        poison(o.scales.x, comm.stream());
        poison(o.scales.weight, comm.stream());
        for (int i = 0; i < 3; ++i) call(candidate, o, moved.scales);
        EXPECT_EQ(digest(o.out.tensor, comm.stream()), digests[1][0]) << what << ", moved scales";
        MovedScales::copy(comm, moved.scales, o.scales);
        comm.synchronize();
      }
    };
    for (const Scaling scaling : kScalings) {
      for (const DType out : {DType::bf16, DType::f16}) {
        if (out == DType::f16 && scaling == Scaling::tensor) continue;
        for (const Shape3& size : {Shape3{256, 112, 512},
                                   {128, 528, 1040},
                                   {128, 2688, 8192},
                                   {512, 1008, 2208},
                                   {1536, 4096, 1040},
                                   {1024, 528, 8192},
                                   {512, 4608, 3280},
                                   {512, 3200, 5328},
                                   {256, 5376, 4960},
                                   {256, 4352, 7632},
                                   {2048, 2304, 6144}}) {
          const OpDesc shape = scaled_shape(size.m * comm.size(), size.n, size.k, scaling, out);
          std::vector<ScaledOperands> ag_sets, rs_sets;
          std::vector<ExactProduct> ag_exact, rs_exact;
          for (const uint64_t seed : {3, 8}) {
            ag_sets.push_back(scaled_ag_operands(comm, shape, seed));
            rs_sets.push_back(scaled_sum_operands(comm, shape, true, seed));
            ag_exact.push_back(exact_product(comm, ag_sets.back()));
            rs_exact.push_back(exact_product(comm, rs_sets.back()));
          }
          // Rows of tiles are processed in pairs, which may span the shards of two ranks.
          if (size.m % 256 == 0 || comm.size() % 2 == 0) {
            gpu::AgGemm ag(comm, lt, shape);
            const bool by_copy_warps =
                std::ranges::any_of(candidates_of(ag, "fused"), [](const Candidate& one) {
                  return one.name.find("copy warps") != std::string::npos;
                });
            EXPECT_EQ(by_copy_warps, shape.m <= 4096) << describe_scaled(shape);
            try_candidates(ag, ag_sets, ag_exact, "ag_gemm " + describe_scaled(shape));
          }
          if (size.m % 256 != 0) continue;
          gpu::GemmRs rs(comm, lt, shape);
          try_candidates(rs, rs_sets, rs_exact, "gemm_rs " + describe_scaled(shape));
        }
      }
    }
  });
}

// Truncation in narrow accumulators adds up if all terms are positive: the bound allows for a
// limited span of K between promotions (tests/bench/error_bound_test.cc).
TEST_P(Fp8Fused, LongSumsArePromotedInTime) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const auto try_candidates = [&](const auto& op, const ScaledOperands& o) {
      const auto fused = candidates_of(op, "fused");
      ASSERT_GT(fused.size(), 0u);
      for (const Candidate& candidate : fused) {
        poison(o.out.tensor, comm.stream());
        candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, &o.scales});
        expect_right(comm, o, candidate.name);
      }
    };
    // The first shape splits tiles along K.
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{256, 5376, 4960}, {512, 1008, 4096}}) {
      const OpDesc shape = scaled_shape(m * comm.size(), n, k, Scaling::tensor, DType::f16);
      gpu::AgGemm ag(comm, lt, shape);
      try_candidates(ag, scaled_ag_operands(comm, shape, 3, Values::positive));
      gpu::GemmRs rs(comm, lt, shape);
      try_candidates(rs, scaled_sum_operands(comm, shape, true, 4, Values::positive));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Fp8Fused, testing::Values(2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
