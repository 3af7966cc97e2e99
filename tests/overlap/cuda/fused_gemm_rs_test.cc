// GEMM+RS by the fused kernel that adds arriving partial sums, on 2 to 4 GPUs.
#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "bench/cuda/verify.h"
#include "comm/device/signal_kernels.h"
#include "core/system/env.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/random.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/operands.h"

namespace tandem::test {
namespace {

using namespace gpu;

class FusedGemmRs : public OnGpus {};

// One column of tiles and many, N and K that end within a tile and a k-step, K hardly longer than
// the chunks. On 132 SMs the last wave of the sixth shape is split in two on 2 to 4 ranks; those of
// the last four shapes, depending on the number of ranks, five ways or more (wave_split_test.cc
// covers every split). Every plan is used by some shape.
TEST_P(FusedGemmRs, BitsAreReproducibleUnderRandomDelaysBetweenOtherAlgorithms) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    std::set<std::string> plans;
    for (const OpDesc& shape :
         {OpDesc{256 * comm.size(), 136, 512}, OpDesc{512 * comm.size(), 1000, 2200},
          OpDesc{1536 * comm.size(), 4096, 1024}, OpDesc{4096 * comm.size(), 520, 1096},
          OpDesc{2304 * comm.size(), 2048, 1544, DType::f16}, OpDesc{512 * comm.size(), 9216, 1640},
          OpDesc{512 * comm.size(), 6400, 2664}, OpDesc{2048 * comm.size(), 4608, 3072},
          OpDesc{256 * comm.size(), 10752, 2472}, OpDesc{256 * comm.size(), 8704, 3816}}) {
      GemmRs rs(comm, lt, shape, Algorithm::fused);
      const Operands o = sum_operands(comm, shape, true, 4);
      for (int variant = 0; variant < rs.variants(Algorithm::fused); ++variant) {
        rs.use_variant(Algorithm::fused, variant);
        plans.insert(rs.describe(Algorithm::fused));
        std::vector<uint64_t> digests;
        for (uint64_t i = 0; i < 30; ++i) {
          const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
          if (delay < 20000) launch_pause(delay, comm.stream());
          if (i % 7 == 0) rs.run(Algorithm::chunked, o.x, o.weight, o.out);
          poison(o.out, comm.stream());
          rs.run(Algorithm::fused, o.x, o.weight, o.out);
          digests.push_back(digest(o.out, comm.stream()));
        }
        const std::string what = fmt::format("{}, M {} N {} K {}", rs.describe(Algorithm::fused),
                                             shape.m, shape.n, shape.k);
        expect_right(comm, o, what);
        EXPECT_EQ(digests, std::vector<uint64_t>(30, digests[0])) << what;
      }
    }
    EXPECT_EQ(plans, (std::set<std::string>{"shards in 2 chunks", "shards in 4 chunks",
                                            "stored, one of 6 later", "stored, local tiles between",
                                            "stored, local tiles last"}));
  });
}

// Non-finite values stay in their own row of the sum. An infinity stays one also in a tile that is
// split along K, with the infinite value at the end of K.
TEST_P(FusedGemmRs, InfinitiesStayInTheirRow) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{512 * comm.size(), 9216, 1640};
    GemmRs rs(comm, lt, shape, Algorithm::fused);
    const Operands o = sum_operands(comm, shape, true, 4);
    const int64_t rows = shape.m / comm.size(), row = rows - 77;
    const uint16_t infinity = 0x7f80;
    if (comm.rank() == 1) {
      for (int owner = 0; owner < comm.size(); ++owner) {
        auto* of_row = static_cast<uint16_t*>(o.x.rows(owner * rows + row, 1).data());
        write(comm, of_row + shape.k - 1, std::vector(1, infinity));
      }
    }
    for (int variant = 0; variant < rs.variants(Algorithm::fused); ++variant) {
      rs.use_variant(Algorithm::fused, variant);
      SCOPED_TRACE(rs.describe(Algorithm::fused));
      rs.run(Algorithm::fused, o.x, o.weight, o.out);
      for (const uint16_t value : read<uint16_t>(comm, o.out.rows(row, 1)))
        ASSERT_EQ(value & 0x7fff, infinity);
      for (const Shard& finite : {Shard{0, row}, Shard{row + 1, rows - row - 1}}) {
        ProductReference reference = o.reference;
        reference.first_row += finite.begin;
        const Tensor shard = o.out.rows(finite.begin, finite.count);
        const Verdict verdict = verify_product(shard, reference, shard.elements(), comm.stream());
        EXPECT_EQ(verdict.not_finite, 0);
        EXPECT_LE(verdict.of_bound, 1);
      }
    }
  });
}

// The plan that sends tiles to their owners changes from call to call; some calls are replayed.
TEST_P(FusedGemmRs, PlansAlternate) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{2304 * comm.size(), 2048, 1096};
    GemmRs rs(comm, lt, shape, Algorithm::fused);
    const Operands o = sum_operands(comm, shape, true, 4);
    const auto call = [&](int variant) {
      rs.use_variant(Algorithm::fused, variant);
      rs.run(Algorithm::fused, o.x, o.weight, o.out);
    };
    std::vector<uint64_t> alone;
    std::vector<CapturedCalls> captured;
    for (int variant = 0; variant < rs.variants(Algorithm::fused); ++variant) {
      call(variant);
      alone.push_back(digest(o.out, comm.stream()));
      expect_right(comm, o, rs.describe(Algorithm::fused));
      captured.emplace_back(comm, [&] { call(variant); });
    }
    for (uint64_t i = 0; i < 60; ++i) {
      const auto random = philox(3, 0, i);  // equal on all ranks
      const size_t variant = random[0] % alone.size();
      if (philox(4, uint64_t(comm.rank()), i)[0] % 3 == 0) launch_pause(30000, comm.stream());
      poison(o.out, comm.stream());
      random[1] % 3 == 0 ? captured[variant].launch() : call(int(variant));
      ASSERT_EQ(digest(o.out, comm.stream()), alone[variant]) << "call " << i;
    }
  });
}

// Covers every plan.
TEST_P(FusedGemmRs, AbsentRankIsNamed) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  struct Call {
    LtContext lt;
    GemmRs rs;
    Operands o;
    Call(GpuCommunicator& comm, const OpDesc& shape)
        : rs(comm, lt, shape, Algorithm::fused), o(sum_operands(comm, shape, true, 4)) {}
  };
  int variants = 1;
  for (int variant = 0; variant < variants; ++variant) {
    const auto error = timeout_without_last([&](GpuCommunicator& comm) {
      const auto call = std::make_shared<Call>(comm, OpDesc{2304 * comm.size(), 2048, 1096});
      if (comm.rank() == 0) variants = call->rs.variants(Algorithm::fused);
      return [call, variant] {
        call->rs.use_variant(Algorithm::fused, variant);
        call->rs.run(Algorithm::fused, call->o.x, call->o.weight, call->o.out);
      };
    });
    EXPECT_EQ(error ? error->op : "", "gemm_rs") << variant;
  }
  EXPECT_EQ(variants, int(std::size(kTileDeliveries)));
}

INSTANTIATE_TEST_SUITE_P(Gpu, FusedGemmRs, testing::Values(2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
