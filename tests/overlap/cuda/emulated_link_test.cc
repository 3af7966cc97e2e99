// Emulated link between ranks that share a GPU: no operation is faster than the link carries its
// bytes, and results are right.
#include <fmt/format.h>

#include <functional>
#include <string>
#include <vector>

#include "bench/cuda/verify.h"
#include "collectives/cuda/all_reduce.h"
#include "collectives/cuda/shard_exchange.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/collectives.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/matrix.h"
#include "tests/overlap/cuda/operands.h"
#include "tune/cuda/measure.h"

namespace tandem::test {
namespace {

using namespace gpu;

constexpr EmulatedLink kSlow{2e9, 20e-6};

class EmulatedGpuLink : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!has_gpus_for(1)) GTEST_SKIP() << "needs a GPU";
  }
  void run(const std::function<void(GpuCommunicator&)>& body) {
    run_gpus({GetParam(), kSlow, 20, GetParam()}, [&](Communicator& comm) { body(as_gpu(comm)); });
  }
};

/// Checks `call`, which has run before and sends `bytes` from this rank.
void expect_no_faster(Stopwatch& stopwatch, double bytes, const std::string& what,
                      const std::function<void()>& call) {
  const double us = stopwatch.time_once(call, 1000), minimum = bytes / kSlow.bytes_per_s * 1e6;
  EXPECT_GE(us, minimum) << what;
  EXPECT_LE(us, 5 * minimum + 20000) << what;
}

TEST_P(EmulatedGpuLink, CommunicatorNamesIt) {
  run([](GpuCommunicator& comm) { EXPECT_EQ(comm.link(), "emulated 2 GB/s 20 us same-gpu"); });
}

TEST_P(EmulatedGpuLink, CollectivesAreNoFasterThanTheLink) {
  run([](GpuCommunicator& comm) {
    const int world = comm.size(), rank = comm.rank();
    Stopwatch stopwatch(comm);
    const int64_t rows = 64 * world, columns = 4096;
    const Matrix whole(DType::bf16, rows, columns), shard(DType::bf16, 64, columns),
        other(DType::bf16, rows, columns);
    const auto of_whole = double(whole.tensor.bytes()), of_shard = double(shard.tensor.bytes());
    const auto fill = [&] { fill_uniform(whole.tensor, 7, 20 + uint64_t(rank), 0, comm.stream()); };
    const auto expect_sum = [&](const Tensor& out, const std::string& what) {
      const Verdict sum = verify_sum(out, 7, 20, world, comm.stream());
      EXPECT_LE(sum.of_bound, 1) << what;
      EXPECT_EQ(sum.not_finite, 0) << what;
    };
    AllReduce all_reduces(comm, rows * columns, DType::bf16);
    fill();
    for (const AllReduceAlgorithm algorithm :
         {AllReduceAlgorithm::nccl, AllReduceAlgorithm::one_shot, AllReduceAlgorithm::two_shot,
          AllReduceAlgorithm::pipelined}) {
      if (!all_reduces.fits(rows * columns, algorithm)) continue;
      const std::string what = fmt::format("all_reduce {}", gpu::name_of(algorithm));
      const double minimum = 2 * (of_whole - of_shard);
      expect_no_faster(stopwatch, minimum, what,
                       [&] { all_reduces.run(whole.tensor, other.tensor, algorithm); });
      if (algorithm != AllReduceAlgorithm::nccl) expect_sum(other.tensor, what);
    }
    for (const Wire& wire : {Wire::parse("int8"), Wire::parse("int4:g32"), Wire::parse("mxfp8")}) {
      const double minimum = 2 * double(wire.bytes(64 * columns, DType::bf16)) * (world - 1);
      const std::string what = "all_reduce " + wire.describe();
      fill();
      all_reduce(comm, whole.tensor, wire);  // allocates
      fill();
      expect_no_faster(stopwatch, minimum, what, [&] { all_reduce(comm, whole.tensor, wire); });
      const double each = wire.error_bound();  // values are at most 1
      EXPECT_LE(verify_sum(whole.tensor, 7, 20, world, comm.stream()).max_rel,
                world * each * (2 + each) + 0x1p-7)
          << what;
    }
    ShardExchange& exchange = shard_exchange(comm);
    for (const int64_t some : {int64_t(8), rows}) {
      const Tensor slice = whole.tensor.rows(0, some * world > rows ? rows : some * world);
      const Shard local = shard_of(slice.dim(0), world, rank);
      const Tensor local_rows = shard.tensor.rows(0, local.count);
      const double sent = double(local_rows.bytes()) * (world - 1);
      for (const ShardAlgorithm algorithm : {ShardAlgorithm::one_shot, ShardAlgorithm::pipelined}) {
        if (!exchange.fits(slice, algorithm)) continue;
        const std::string what =
            fmt::format("{} of {} rows", gpu::name_of(algorithm), slice.dim(0));
        fill();
        expect_no_faster(stopwatch, sent, "reduce_scatter " + what,
                         [&] { exchange.reduce_scatter(slice, local_rows, algorithm); });
        expect_no_faster(stopwatch, sent, "all_gather " + what,
                         [&] { exchange.all_gather(local_rows, slice, algorithm); });
      }
    }
    const std::vector<int64_t> each(size_t(world), 64);
    expect_no_faster(stopwatch, of_whole - of_shard, "all_to_all",
                     [&] { all_to_all(comm, whole.tensor, each, other.tensor, each); });
    expect_no_faster(stopwatch, rank == 0 ? of_whole * (world - 1) : 0, "broadcast",
                     [&] { broadcast(comm, whole.tensor, 0); });
  });
}

TEST_P(EmulatedGpuLink, EncodesOnlyIfFaster) {
  run([](GpuCommunicator& comm) {
    const Wire wire = Wire::parse("int4:g32");
    const int64_t rows = 64 * comm.size();
    const Matrix whole(DType::bf16, rows, 4096), few(DType::f32, 1, 8);
    const auto bits_after = [&](const Matrix& data, const auto& call) {
      fill_uniform(data.tensor, 7, 20 + uint64_t(comm.rank()), 0, comm.stream());
      call(data.tensor);
      const uint64_t bits = digest(data.tensor, comm.stream());
      const auto of_all = comm.slowest(std::vector<double>{double(bits >> 12)});
      EXPECT_EQ(double(bits >> 12), of_all[0]) << "ranks differ";
      return bits;
    };
    const auto uncompressed = [&](const Tensor& data) { all_reduce(comm, data); };
    const auto encoded = [&](const Tensor& data) { all_reduce(comm, data, wire); };
    const auto either = [&](const Tensor& data) {
      all_reduce(comm, data, AllowUncompressed{wire});
    };
    const uint64_t large = bits_after(whole, either);  // the link dominates the time
    EXPECT_EQ(large, bits_after(whole, encoded));
    EXPECT_NE(large, bits_after(whole, uncompressed));
    EXPECT_EQ(large, bits_after(whole, either)) << "another choice";
    const uint64_t small = bits_after(few, either);
    EXPECT_TRUE(small == bits_after(few, uncompressed) || small == bits_after(few, encoded));
    const Matrix local_rows(DType::bf16, 64, 4096);
    const auto gather = [&](const auto& wire_of_it) {
      return bits_after(whole, [&](const Tensor& all) {
        fill_uniform(local_rows.tensor, 7, 20 + uint64_t(comm.rank()), 0, comm.stream());
        all_gather(comm, local_rows.tensor, all, wire_of_it);
      });
    };
    EXPECT_EQ(gather(AllowUncompressed{wire}), gather(wire));
  });
}

TEST_P(EmulatedGpuLink, OperatorsAreNoFasterThanTheLink) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    Stopwatch stopwatch(comm);
    const int64_t world = comm.size();
    const auto try_candidates = [&](const auto& op, const Operands& o, const char* name,
                                    double bytes) {
      for (const Candidate& candidate : candidates_of(op)) {
        const std::string what = fmt::format("{} {}", name, candidate.name);
        for (int call = 0; call < 3; ++call) {  // the last one is replayed
          poison(o.out, comm.stream());
          const auto run = [&] { candidate.run({o.x, o.weight, o.out}); };
          if (call > 0) {
            expect_no_faster(stopwatch, bytes, what, run);
          } else {  // loads libraries, which may wait for pending work
            run();
            comm.synchronize();
          }
        }
        expect_right(comm, o, what, candidate.name);
      }
    };
    const OpDesc shape{512 * world, 1024, 768};
    const auto slice = double(shape.m / world * (world - 1));
    AgGemm ag(comm, lt, shape);
    try_candidates(ag, ag_operands(comm, shape, 3), "ag_gemm", slice * double(shape.k) * 2);
    GemmRs rs(comm, lt, shape);
    try_candidates(rs, sum_operands(comm, shape, true, 4), "gemm_rs", slice * double(shape.n) * 2);
    const OpDesc small{64, 4096, 768};
    GemmAr ar(comm, lt, small);
    try_candidates(ar, sum_operands(comm, small, false, 5), "gemm_ar",
                   4 * double(small.m * small.n * (world - 1)) / double(world));
    EXPECT_TRUE(candidates_of(ar, "fused").empty());
  });
}

INSTANTIATE_TEST_SUITE_P(World, EmulatedGpuLink, testing::Values(2, 3, 4), gpus_name);

TEST(EmulatedGpuLinks, RequireRanksThatShareAGpu) {
  if (!has_gpus_for(1)) GTEST_SKIP() << "needs a GPU";
  const auto nothing = [](Communicator&) {};
  EXPECT_THROW(run_gpus({1, kSlow}, nothing), InvalidArgument);
  EXPECT_THROW(run_gpus({2, EmulatedLink{1e3, 0}, 20, 2}, nothing), InvalidArgument);
}

}  // namespace
}  // namespace tandem::test
