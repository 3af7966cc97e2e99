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
TEST_P(FusedGemmRs, BitsAreReproducibleUnderRandomDelaysBetweenOtherCandidates) {
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
      GemmRs rs(comm, lt, shape);
      const Operands o = sum_operands(comm, shape, true, 4);
      const Candidate chunked = candidate_of(rs, "chunked");
      for (const Candidate& candidate : candidates_of(rs, "fused")) {
        plans.insert(candidate.name);
        std::vector<uint64_t> digests;
        for (uint64_t i = 0; i < 30; ++i) {
          const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
          if (delay < 20000) launch_pause(delay, comm.stream());
          if (i % 7 == 0) chunked.run({o.x, o.weight, o.out});
          poison(o.out, comm.stream());
          candidate.run({o.x, o.weight, o.out});
          digests.push_back(digest(o.out, comm.stream()));
        }
        const std::string what =
            fmt::format("{}, M {} N {} K {}", candidate.name, shape.m, shape.n, shape.k);
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
    GemmRs rs(comm, lt, shape);
    const Operands o = sum_operands(comm, shape, true, 4);
    const int64_t rows = shape.m / comm.size(), row = rows - 77;
    const uint16_t infinity = 0x7f80;
    if (comm.rank() == 1) {
      for (int owner = 0; owner < comm.size(); ++owner) {
        auto* of_row = static_cast<uint16_t*>(o.x.rows(owner * rows + row, 1).data());
        write(comm, of_row + shape.k - 1, std::vector(1, infinity));
      }
    }
    for (const Candidate& candidate : candidates_of(rs, "fused")) {
      SCOPED_TRACE(candidate.name);
      candidate.run({o.x, o.weight, o.out});
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
    GemmRs rs(comm, lt, shape);
    const Operands o = sum_operands(comm, shape, true, 4);
    const auto fused = candidates_of(rs, "fused");
    const auto call = [&](const Candidate& candidate) { candidate.run({o.x, o.weight, o.out}); };
    std::vector<uint64_t> alone;
    std::vector<CapturedCalls> captured;
    for (const Candidate& candidate : fused) {
      call(candidate);
      alone.push_back(digest(o.out, comm.stream()));
      expect_right(comm, o, candidate.name);
      captured.emplace_back(comm, [&] { call(candidate); });
    }
    for (uint64_t i = 0; i < 60; ++i) {
      const auto random = philox(3, 0, i);  // equal on all ranks
      const size_t number = random[0] % alone.size();
      if (philox(4, uint64_t(comm.rank()), i)[0] % 3 == 0) launch_pause(30000, comm.stream());
      poison(o.out, comm.stream());
      random[1] % 3 == 0 ? captured[number].launch() : call(fused[number]);
      ASSERT_EQ(digest(o.out, comm.stream()), alone[number]) << "call " << i;
    }
  });
}

// Covers every plan.
TEST_P(FusedGemmRs, AbsentRankIsNamed) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  struct Call {
    LtContext lt;
    GemmRs rs;
    std::vector<Candidate> fused;
    Operands o;
    Call(GpuCommunicator& comm, const OpDesc& shape)
        : rs(comm, lt, shape),
          fused(candidates_of(rs, "fused")),
          o(sum_operands(comm, shape, true, 4)) {}
  };
  size_t count = 1;
  for (size_t number = 0; number < count; ++number) {
    const auto error = timeout_without_last([&](GpuCommunicator& comm) {
      const auto call = std::make_shared<Call>(comm, OpDesc{2304 * comm.size(), 2048, 1096});
      if (comm.rank() == 0) count = call->fused.size();
      return [call, number] { call->fused[number].run({call->o.x, call->o.weight, call->o.out}); };
    });
    EXPECT_EQ(error ? error->op : "", "gemm_rs") << number;
  }
  EXPECT_EQ(count, std::size(kTileDeliveries));
}

INSTANTIATE_TEST_SUITE_P(Gpu, FusedGemmRs, testing::Values(2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
