#include "bench/bench_moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "gemm/gemm.h"
#include "overlap/moe/load.h"
#include "tandem/error.h"
#include "tests/comm/ranks.h"

namespace tandem {
namespace {

BenchRequest request_of(const char* op, int ep, int tp, double imbalance) {
  BenchRequest request;
  request.op = op;
  request.m = 30;
  request.repeats = 1;
  request.moe.model = "mixtral-8x7b";
  request.moe.scale = 128;
  request.moe.ep = ep;
  request.moe.tp = tp;
  request.moe.imbalance = imbalance;
  return request;
}

BenchResult result_of(BenchRequest request, std::optional<EmulatedLink> link = {}) {
  BenchResult result;
  WorldOptions world;
  world.ranks = request.moe.ep * request.moe.tp;
  world.link = link;
  complete_moe(request, world.ranks);
  run_threads(world, [&](Communicator& comm) {
    set_kernel_threads(1);
    const BenchResult local = run_bench(comm, request);
    if (comm.rank() == 0) result = local;
  });
  return result;
}

TEST(BenchMoe, EveryFormIsCheckedAgainstAnUnfusedLayer) {
  if (test::mpi_world()) GTEST_SKIP() << "threads";
  for (const char* op : {"moe", "moe_dispatch_gemm", "moe_gemm_combine"}) {
    for (const auto& [ep, tp] : {std::pair(1, 1), {2, 1}, {2, 2}, {1, 3}}) {
      for (const double imbalance : {1.0, double(ep), 0.0}) {
        const BenchResult result = result_of(request_of(op, ep, tp, imbalance));
        EXPECT_TRUE(result.ok()) << op << " ep " << ep << " tp " << tp << ": " << result.max_rel;
        if (imbalance == 1) {  // otherwise rank 0 may have nothing to send
          EXPECT_EQ(result.bytes > 0, ep * tp > 1);
        }
        EXPECT_GT(result.gemm.median_us, 0);
      }
    }
  }
  BenchRequest backward = request_of("moe", 2, 1, 2);
  backward.moe.backward = true;
  EXPECT_TRUE(result_of(backward).ok());
  int64_t bytes = INT64_MAX;
  for (const MoeSave save : {MoeSave::sorted, MoeSave::rows, MoeSave::recompute}) {
    backward.moe.save = save;
    const BenchResult result = result_of(backward);
    EXPECT_TRUE(result.ok());
    EXPECT_LT(result.saved_bytes, bytes);
    bytes = result.saved_bytes;
  }
  EXPECT_GT(bytes, 0);
  backward.moe.save = MoeSave::sorted;
  backward.dtype = DType::bf16;
  EXPECT_TRUE(result_of(backward).ok());
}

TEST(BenchMoe, RoutingIsRandomWithTheRequestedImbalance) {
  BenchRequest request = request_of("moe", 4, 1, 1);
  request.m = 4096;
  complete_moe(request, 4);
  const MoeImbalance even = measured_imbalance(request, 4);
  EXPECT_GT(even.of_ranks, 1.0);  // random, not round-robin
  EXPECT_LT(even.of_ranks, 1.1);
  EXPECT_GE(even.of_experts, even.of_ranks);
  request.moe.imbalance = 2;
  EXPECT_NEAR(measured_imbalance(request, 4).of_ranks, 2, 0.2);
  request.moe.imbalance = 0;
  EXPECT_GT(measured_imbalance(request, 4).of_experts, 2);
  // A row whose two experts are on one rank is sent there once: some of the rows, as in a real
  // model.
  const schedule::MoeGrid grid{8, 2, 1};
  const std::vector<int32_t> chosen = chosen_experts(grid, 2, {1, 1}, 0, 4096);
  int64_t both = 0;
  for (size_t i = 0; i < chosen.size(); i += 2) {
    both += grid.holder(chosen[i]) == grid.holder(chosen[i + 1]);
  }
  EXPECT_NEAR(double(both) / 4096, 3.0 / 7, 0.05);
}

TEST(BenchMoe, AnySizesMayBeGiven) {
  if (test::mpi_world()) GTEST_SKIP() << "threads";
  BenchRequest local = request_of("moe", 2, 1, 1);
  local.moe = {.model = "", .experts = 60, .top_k = 4, .ep = 2, .hidden = 40, .ffn = 24};
  EXPECT_TRUE(result_of(local).ok());
  complete_moe(local, 2);
  EXPECT_EQ(local.moe.model, "custom");
  EXPECT_EQ(local.k, 40);
  EXPECT_EQ(local.n, 24);
  BenchRequest changed = request_of("moe", 2, 1, 1);
  changed.moe.experts = 6;
  complete_moe(changed, 2);
  EXPECT_EQ(changed.moe.model, "custom");
  EXPECT_EQ(changed.moe.top_k, 2);
  EXPECT_EQ(changed.k, 32);
  changed.moe.top_k = 7;
  EXPECT_THROW(complete_moe(changed, 2), InvalidArgument);
}

TEST(BenchMoeLong, RowsMayBeSentEncoded) {
  if (test::mpi_world()) GTEST_SKIP() << "threads";
  for (const char* op : {"moe", "moe_dispatch_gemm", "moe_gemm_combine"}) {
    for (const char* format : {"int4:g32", "lossless"}) {
      for (const auto& [ep, tp] : {std::pair(1, 1), {2, 1}, {2, 2}}) {
        for (const DType dtype : {DType::f32, DType::bf16}) {
          SCOPED_TRACE(testing::Message() << op << " " << format << " ep " << ep << " tp " << tp
                                          << " " << name_of(dtype));
          BenchRequest request = request_of(op, ep, tp, 1);
          request.m = 64;
          request.wire = Wire::parse(format);
          request.moe.scale = request.wire.is_exact() ? 32 : 64;  // small messages are not coded
          request.dtype = dtype;
          const BenchResult result = result_of(request);
          EXPECT_TRUE(result.ok()) << result.max_rel << " of " << result.bound;
          EXPECT_TRUE(result.candidates.contains("serial, 1 chunk as " + request.wire.describe()));
          EXPECT_EQ(result.serial_name.find(" as "), std::string::npos);
          if (ep * tp == 1 || request.op == "moe")
            continue;  // their uncompressed rows may be chosen
          EXPECT_GT(result.wire_bytes, 0);
          EXPECT_LT(result.wire_bytes, result.bytes);
        }
      }
    }
  }
  BenchRequest backward = request_of("moe", 2, 1, 1);
  backward.moe.backward = true;
  backward.wire = Wire::parse("int8");
  EXPECT_THROW(check_bench(backward, 2), InvalidArgument);
}

TEST(BenchMoe, TimelineHasTheGemmsAndTransfersOfEveryRank) {
  if (test::mpi_world()) GTEST_SKIP() << "threads";
  BenchRequest request = request_of("moe", 2, 1, 1);
  request.timeline = true;
  request.chunks = 2;
  const BenchResult result = result_of(request, EmulatedLink{1e8, 1e-5});
  ASSERT_EQ(result.timeline.size(), 2u);
  for (const RankEvents& rank : result.timeline) {
    const auto count = [&](SpanKind kind) {
      return std::ranges::count(rank.events, kind, &SpanEvent::kind);
    };
    EXPECT_GE(count(SpanKind::gemm), 2) << rank.rank;      // into the experts and out of them
    EXPECT_GE(count(SpanKind::transfer), 2) << rank.rank;  // dispatch and combine
  }
}

TEST(BenchMoe, InvalidRequestsAreRefused) {
  const auto error_of = [](BenchRequest request, int ranks) -> std::string {
    try {
      complete_moe(request, ranks);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(error_of(request_of("moe", 2, 1, 1), 4),
            "bench: moe with ep 2 and tp 1 on 4 ranks: expected ep x tp");
  EXPECT_EQ(error_of(request_of("moe", 3, 1, 1), 3),
            "bench: --ep 3: expected a divisor of mixtral-8x7b's 8 experts");
  EXPECT_EQ(error_of(request_of("moe", 2, 1, 3), 2),
            "bench: --imbalance 3: expected 1 to ep = 2, or 0 for Zipf's law");
}

}  // namespace
}  // namespace tandem
