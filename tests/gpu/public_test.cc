// Public interface on GPU ranks: operators under every strategy, the saved gather, collectives on
// odd sizes, errors, and the tuner's cache.
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "comm/device/signal_kernels.h"
#include "core/env.h"
#include "tandem/collectives.h"
#include "tandem/overlap.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/gpu/host_copies.h"
#include "tests/gpu/matrix.h"
#include "tests/gpu/strategy_way.h"
#include "tune/tuner.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Public : public OnGpus {};

constexpr Strategy kStrategies[] = {Strategy::serial, Strategy::overlapped, Strategy::automatic};

TEST_P(Public, OperatorsMatchReferenceUnderEveryStrategyAndLayout) {
  run([](GpuCommunicator& comm) {
    const uint64_t rank = uint64_t(comm.rank());
    for (const DType dtype : {DType::bf16, DType::f32}) {
      for (const Strategy strategy : kStrategies) {
        if (strategy == Strategy::overlapped && comm.size() == 1) continue;
        for (const bool kn : {false, true}) {
          const int64_t m = 37, n = 24, k = 40;
          const Shard local = shard_of(m, comm.size(), comm.rank());
          const std::string what = fmt::format("{} {} {} of {}", name_of(strategy), name_of(dtype),
                                               kn ? "kn" : "nk", comm.size());
          const Matrix x(dtype, local.count, k), whole_x(dtype, m, k), w(dtype, n, k),
              wt(dtype, k, n), out(dtype, m, n), rows(dtype, local.count, n);
          // w holds the reference's weight; wt is its transpose.
          fill_uniform(w.tensor, 3, 200 + rank, 0, comm.stream());
          for (int64_t row = 0; row < n; ++row) {  // column `row` of wt
            gpu::check(cudaMemcpy2DAsync(wt.memory.data() + size_t(row) * size_of(dtype),
                                         size_t(n) * size_of(dtype),
                                         w.memory.data() + size_t(row * k) * size_of(dtype),
                                         size_of(dtype), size_of(dtype), size_t(k),
                                         cudaMemcpyDefault, comm.stream()),
                       "transpose");
          }
          const Tensor weight = kn ? wt.tensor.transposed() : w.tensor;

          AgGemm ag(comm, {m, n, k, dtype, true, false, kn}, {strategy, 0});
          fill_uniform(x.tensor, 3, 100, local.begin * k, comm.stream());
          fill_uniform(whole_x.tensor, 3, 100, 0, comm.stream());
          poison(out.tensor, comm.stream());
          ag.run(x.tensor, weight, out.tensor);
          expect_right(comm, out.tensor, {3, 100, 200 + rank, 1, k, 0, dtype}, "ag_gemm " + what);
          EXPECT_EQ(digest(ag.gathered(), comm.stream()), digest(whole_x.tensor, comm.stream()));

          fill_uniform(whole_x.tensor, 3, 100 + rank, 0, comm.stream());
          const ProductReference sum{3, 100, 200, comm.size(), k, 0, dtype};
          GemmRs rs(comm, {m, n, k, dtype, false, kn}, {strategy, 0});
          poison(rows.tensor, comm.stream());
          rs.run(whole_x.tensor, weight, rows.tensor);
          ProductReference shard = sum;
          shard.first_row = local.begin;
          expect_right(comm, rows.tensor, shard, "gemm_rs " + what, algorithm_of(strategy));

          GemmAr ar(comm, {m, n, k, dtype, false, kn}, {strategy, 0});
          poison(out.tensor, comm.stream());
          ar.run(whole_x.tensor, weight, out.tensor);
          expect_right(comm, out.tensor, sum, "gemm_ar " + what, algorithm_of(strategy));
          comm.require_same("bits", std::to_string(digest(out.tensor, comm.stream())));
        }
      }
    }
  });
}

TEST_P(Public, DeclaredF32OutputMatchesReference) {
  run([](GpuCommunicator& comm) {
    const uint64_t rank = uint64_t(comm.rank());
    const int64_t m = 37, n = 24, k = 40;
    const Shard local = shard_of(m, comm.size(), comm.rank());
    const Matrix x(DType::bf16, local.count, k), whole_x(DType::bf16, m, k), w(DType::bf16, n, k),
        out(DType::f32, m, n), rows(DType::f32, local.count, n);
    fill_uniform(w.tensor, 3, 200 + rank, 0, comm.stream());
    fill_uniform(x.tensor, 3, 100, local.begin * k, comm.stream());
    fill_uniform(whole_x.tensor, 3, 100 + rank, 0, comm.stream());
    for (const Strategy strategy : {Strategy::serial, Strategy::automatic}) {
      tandem::AgGemm ag(comm,
                        {.m = m, .n = n, .k = k, .dtype = DType::bf16, .out_dtype = DType::f32},
                        {strategy, 0});
      poison(out.tensor, comm.stream());
      ag.run(x.tensor, w.tensor, out.tensor);
      expect_right(comm, out.tensor, {3, 100, 200 + rank, 1, k, 0, DType::bf16}, "ag_gemm");
      tandem::GemmRs rs(comm,
                        {.m = m, .n = n, .k = k, .dtype = DType::bf16, .out_dtype = DType::f32},
                        {strategy, 0});
      poison(rows.tensor, comm.stream());
      rs.run(whole_x.tensor, w.tensor, rows.tensor);
      expect_right(comm, rows.tensor, {3, 100, 200, comm.size(), k, local.begin, DType::bf16},
                   "gemm_rs", algorithm_of(strategy));
    }
  });
}

// Serial and overlapped select candidates of their form from any implementation. If nothing
// overlaps, as with f32 sums, strategy() reports what runs.
TEST_P(Public, StrategySelectsACandidateOfItsForm) {
  if (ranks() == 1) GTEST_SKIP() << "one rank has nothing to overlap";
  run([](GpuCommunicator& comm) {
    const int64_t m = 64, n = 48, k = 80;
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped}) {
      const tandem::AgGemm ag(comm, {m, n, k, DType::bf16}, {strategy, 0});
      EXPECT_EQ(ag.strategy(), strategy);
      const tandem::GemmRs rs(comm, {m, n, k, DType::bf16}, {strategy, 0});
      EXPECT_EQ(rs.strategy(), strategy);
      const tandem::GemmAr ar(comm, {m, n, k, DType::f32}, {strategy, 0});
      EXPECT_EQ(ar.strategy(), Strategy::serial);
    }
  });
}

// i32 vectors: element i of rank r is 1000 r + i.
std::vector<int> values(int rank, int64_t first, int64_t count) {
  std::vector<int> v(static_cast<size_t>(count));
  std::iota(v.begin(), v.end(), 1000 * rank + int(first));
  return v;
}

TEST_P(Public, CollectivesAreExactOnOddSizes) {
  run([](GpuCommunicator& comm) {
    const int world = comm.size(), rank = comm.rank();
    for (const int64_t rows : {int64_t(12), int64_t(13), int64_t(2)}) {
      const int64_t columns = 3;
      const Shard local = shard_of(rows, world, rank);
      const Matrix whole(DType::i32, rows, columns), shard(DType::i32, local.count, columns);
      write(comm, shard.tensor.data(), values(0, local.begin * columns, local.count * columns));
      all_gather(comm, shard.tensor, whole.tensor);
      EXPECT_EQ(read<int>(comm, whole.tensor), values(0, 0, rows * columns));

      write(comm, whole.tensor.data(), values(rank, 0, rows * columns));
      reduce_scatter(comm, whole.tensor, shard.tensor, ReduceOp::max);
      EXPECT_EQ(read<int>(comm, shard.tensor),
                values(world - 1, local.begin * columns, local.count * columns));
      all_reduce(comm, whole.tensor, ReduceOp::max);
      EXPECT_EQ(read<int>(comm, whole.tensor), values(world - 1, 0, rows * columns));

      write(comm, whole.tensor.data(), values(rank, 0, rows * columns));
      broadcast(comm, whole.tensor, world - 1);
      EXPECT_EQ(read<int>(comm, whole.tensor), values(world - 1, 0, rows * columns));
    }
    for (const int64_t elements : {8, 4096, (8 << 20) + 8}) {  // own kernels, own kernels, NCCL
      const Matrix data(DType::bf16, 1, elements);
      fill_uniform(data.tensor, 5, 10 + uint64_t(rank), 0, comm.stream());
      all_reduce(comm, data.tensor);
      comm.synchronize();
      const Verdict verdict = verify_sum(data.tensor, 5, 10, world, comm.stream());
      if (elements <= (8 << 20)) {
        EXPECT_LE(verdict.of_bound, 1) << elements;
      }
      EXPECT_LE(verdict.max_rel, 0.03) << elements;  // NCCL rounds at every hop
      EXPECT_EQ(verdict.not_finite, 0) << elements;
    }
    // Rank r sends r + p + 1 rows to rank p.
    std::vector<int64_t> sends, receives;
    for (int p = 0; p < world; ++p) sends.push_back(rank + p + 1), receives.push_back(p + rank + 1);
    const int64_t total = std::accumulate(sends.begin(), sends.end(), int64_t(0));
    const Matrix out(DType::i32, total, 1), in(DType::i32, total, 1);
    write(comm, out.tensor.data(), values(rank, 0, total));
    all_to_all(comm, out.tensor, sends, in.tensor, receives);
    std::vector<int> expected;
    for (int p = 0; p < world; ++p) {
      int64_t first = 0;
      for (int q = 0; q < rank; ++q) first += p + q + 1;
      const auto rows = values(p, first, p + rank + 1);
      expected.insert(expected.end(), rows.begin(), rows.end());
    }
    EXPECT_EQ(read<int>(comm, in.tensor), expected);
    if (world > 1 && rank < 2) {
      if (rank == 0) send(comm, out.tensor, 1);
      const int64_t sent = world * (world + 1) / 2;  // rows of rank 0
      if (rank == 1) {
        recv(comm, in.tensor.rows(0, sent), 0);
        const auto got = read<int>(comm, in.tensor.rows(0, sent));
        EXPECT_EQ(got, values(0, 0, sent));
      }
    }
  });
}

TEST_P(Public, InvalidTensorsAreNamed) {
  run([](GpuCommunicator& comm) {
    std::vector<float> host(64);
    const Tensor on_host(host.data(), DType::f32, {8, 8});
    EXPECT_THROW(all_reduce(comm, on_host), InvalidArgument);
    const Matrix bytes(DType::u8, 4, 4), data(DType::f32, 8, 8);
    EXPECT_THROW(all_reduce(comm, bytes.tensor), InvalidArgument);
    EXPECT_THROW(all_gather(comm, data.tensor.rows(0, 0), bytes.tensor), InvalidArgument);
    EXPECT_THROW(broadcast(comm, data.tensor, comm.size()), InvalidArgument);
    GemmAr ar(comm, {8, 8, 8}, {Strategy::serial, 0});
    EXPECT_THROW(ar.run(on_host, data.tensor, data.tensor), InvalidArgument);
    const Matrix out(DType::f32, 8, 8);
    EXPECT_THROW(ar.run(data.tensor, data.tensor, out.tensor, &data.tensor), InvalidArgument);
    EXPECT_THROW(GemmAr(comm, {8, 9, 8}), InvalidArgument);
    EXPECT_THROW(GemmAr(comm, {8, int64_t(1) << 40, int64_t(1) << 40}), InvalidArgument);
    EXPECT_THROW(GemmAr(comm, {8, 8, 8}, {Strategy::automatic, 2}), InvalidArgument);

    GemmAr biased(comm, {.m = 8, .n = 8, .k = 8, .bias = true}, {Strategy::serial, 0});
    const Device gpu = data.tensor.device();
    for (const Tensor& bias :
         {Tensor(host.data(), DType::f32, {8}), Tensor(nullptr, DType::f32, {8}, gpu),
          Tensor(data.memory.data() + 4, DType::f32, {8}, gpu), data.tensor,
          Tensor(data.memory.data(), DType::bf16, {8}, gpu)}) {
      EXPECT_THROW(biased.run(data.tensor, data.tensor, out.tensor, &bias), InvalidArgument);
    }
    const auto refused = [&](bool kn, const Tensor& weight) -> std::string {
      GemmAr op(comm, {.m = 8, .n = 8, .k = 4, .weight_kn = kn}, {Strategy::serial, 0});
      const Matrix x(DType::f32, 8, 4);
      try {
        op.run(x.tensor, weight, data.tensor);
      } catch (const InvalidArgument& error) {
        return error.what();
      }
      return "";
    };
    const Matrix nk(DType::f32, 8, 4), kn(DType::f32, 4, 8);
    EXPECT_EQ(refused(false, kn.tensor.transposed()),
              "gemm_ar: weight is f32[8, 4] with strides 1, 8: the shape has weight_kn false: "
              "expected dense rows");
    EXPECT_EQ(refused(true, nk.tensor),
              "gemm_ar: weight is f32[8, 4] with strides 4, 1: the shape has weight_kn true: "
              "expected dense columns, as w.transposed() of [K, N]");
    EXPECT_EQ(refused(false, nk.tensor), "");
    EXPECT_EQ(refused(true, kn.tensor.transposed()), "");
    synchronize(comm);
  });
}

TEST_P(Public, DifferentStrategiesAreAMismatchOnEveryRank) {
  if (ranks() == 1) GTEST_SKIP() << "one rank always agrees";
  run([](GpuCommunicator& comm) {
    for (const Strategy other : {Strategy::serial, Strategy::overlapped}) {
      const Strategy local = comm.rank() + 1 == comm.size() ? other : Strategy::automatic;
      EXPECT_THROW(AgGemm(comm, {256 * comm.size(), 128, 512, DType::bf16}, {local, 0}), Mismatch);
      EXPECT_THROW(GemmRs(comm, {256 * comm.size(), 128, 512, DType::bf16}, {local, 0}), Mismatch);
      EXPECT_THROW(GemmAr(comm, {8, 128, 512, DType::bf16}, {local, 0}), Mismatch);
    }
  });
}

// Concurrent tensor-parallel groups, as in TP x DP; their ranks are in reverse order.
TEST_P(Public, OperatorsRunInGroupsOfRanks) {
  run([](GpuCommunicator& world) {
    const auto group = world.split(world.rank() % 2, -world.rank());
    GpuCommunicator& comm = as_gpu(*group);
    const uint64_t rank = uint64_t(comm.rank());
    for (const Strategy strategy : kStrategies) {
      if (strategy == Strategy::overlapped && comm.size() == 1) continue;
      const int64_t m = 256 * comm.size(), n = 128, k = 512;
      const Shard local = shard_of(m, comm.size(), comm.rank());
      const Matrix x(DType::bf16, local.count, k), whole_x(DType::bf16, m, k), w(DType::bf16, n, k),
          out(DType::bf16, m, n);
      fill_uniform(x.tensor, 3, 100, local.begin * k, comm.stream());
      fill_uniform(whole_x.tensor, 3, 100 + rank, 0, comm.stream());
      fill_uniform(w.tensor, 3, 200 + rank, 0, comm.stream());
      AgGemm ag(comm, {m, n, k, DType::bf16}, {strategy, 0});
      poison(out.tensor, comm.stream());
      ag.run(x.tensor, w.tensor, out.tensor);
      expect_right(comm, out.tensor, {3, 100, 200 + rank, 1, k, 0, DType::bf16}, "ag_gemm");
      GemmAr ar(comm, {m, n, k, DType::bf16}, {strategy, 0});
      poison(out.tensor, comm.stream());
      ar.run(whole_x.tensor, w.tensor, out.tensor);
      expect_right(comm, out.tensor, {3, 100, 200, comm.size(), k, 0, DType::bf16}, "gemm_ar",
                   algorithm_of(strategy));
    }
    world.barrier("groups are done");
  });
}

// Checks cuda.h's contract of the communicator's stream, with a stream of the caller.
TEST_P(Public, CallsRunOnTheCallersStream) {
  run([](GpuCommunicator& nccl) {
    Communicator& comm = nccl;
    EXPECT_EQ(device_of(comm), (Device{DeviceKind::cuda, nccl.device()}));
    CUstream_st* const original = stream_of(comm);
    const Stream local;
    set_stream(comm, local.get());
    EXPECT_EQ(stream_of(comm), local.get());
    const int64_t m = 64, n = 32, k = 64;
    const Matrix x(DType::bf16, m, k), w(DType::bf16, n, k), out(DType::bf16, m, n);
    GemmAr op(comm, {m, n, k, DType::bf16});
    op.run(x.tensor, w.tensor, out.tensor);  // lazy initialization and loading are done
    synchronize(comm);
    poison(out.tensor, local.get());
    launch_pause(500'000'000,
                 local.get());  // later writes in the stream are seen by the later GEMM
    fill_uniform(x.tensor, 3, 100 + uint64_t(comm.rank()), 0, local.get());
    fill_uniform(w.tensor, 3, 200 + uint64_t(comm.rank()), 0, local.get());
    op.run(x.tensor, w.tensor, out.tensor);
    // Ranks that share a GPU wait for each other in the call, longer than the pause.
    if (!nccl.shares_gpu()) {
      EXPECT_EQ(cudaStreamQuery(local.get()), cudaErrorNotReady);
    }
    EXPECT_EQ(cudaStreamQuery(original), cudaSuccess);
    synchronize(comm);
    EXPECT_EQ(cudaStreamQuery(local.get()), cudaSuccess);
    expect_right(nccl, out.tensor, {3, 100, 200, comm.size(), k, 0, DType::bf16}, "own stream",
                 algorithm_of(Strategy::automatic));
    set_stream(comm, original);
  });
}

TEST_P(Public, MeasuredTimesAreCachedAndReused) {
  if (ranks() == 1) GTEST_SKIP() << "one rank has one way";
  const std::string path = env().cache_dir + "/tuner.json", moved_path = path + ".kept";
  if (std::filesystem::exists(path)) std::filesystem::rename(path, moved_path);
  forget_tuned();
  run([](GpuCommunicator& comm) { GemmRs(comm, {96, 64, 64, DType::bf16}); });
  auto cache = nlohmann::json::parse(std::ifstream(path));
  std::string key;
  for (const auto& [name, entry] : cache.items()) {
    if (name.find("gemm_rs m 96 n 64 k 64 bf16") != std::string::npos) key = name;
  }
  ASSERT_NE(key, "");
  auto& times = cache[key]["measured_us"];
  ASSERT_TRUE(times.contains("chunked"));
  for (const bool serial : {true, false}) {
    for (const auto& [algorithm, us] : times.items()) {
      us = algorithm.starts_with("serial") == serial ? 1.0 : 100.0;
    }
    std::ofstream(path) << cache;
    forget_tuned();
    run([&](GpuCommunicator& comm) {
      const GemmRs rs(comm, {96, 64, 64, DType::bf16});
      EXPECT_EQ(rs.strategy(), serial ? Strategy::serial : Strategy::overlapped);
    });
  }
  std::filesystem::remove(path);
  if (std::filesystem::exists(moved_path)) std::filesystem::rename(moved_path, path);
  forget_tuned();
}

INSTANTIATE_TEST_SUITE_P(Gpu, Public, testing::Values(1, 2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
