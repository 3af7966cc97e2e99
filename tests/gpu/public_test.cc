// Public interface on GPU ranks: operators under every strategy, the saved gather, collectives on
// odd sizes, and errors.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "tandem/collectives.h"
#include "tandem/error.h"
#include "tandem/overlap.h"
#include "tests/gpu/public_operands.h"

namespace tandem::test {
namespace {

class Public : public OnGpuRanks {};

constexpr Strategy kStrategies[] = {Strategy::serial, Strategy::overlapped, Strategy::automatic};

/// Whole operands of all ranks, on the host, and the exact results.
struct Problem {
  Problem(Communicator& comm, int64_t rows, int64_t columns, int64_t features)
      : m(rows), n(columns), k(features), local(shard_of(m, comm.size(), comm.rank())) {
    for (int r = 0; r < comm.size(); ++r) {
      xs.push_back(small_numbers(100 + uint64_t(r), m * k));
      weights.push_back(small_numbers(200 + uint64_t(r), n * k));
      add_product(sum, xs.back(), weights.back(), k);
    }
    x = xs[size_t(comm.rank())];
    weight = weights[size_t(comm.rank())];
    add_product(gathered_product, xs[0], weight, k);
  }
  /// AG+GEMM: this rank's rows of xs[0].
  std::vector<float> x_rows() const { return rows_of(xs[0], k, local.begin, local.count); }
  std::vector<float> sum_rows() const { return rows_of(sum, n, local.begin, local.count); }

  int64_t m, n, k;
  Shard local;
  std::vector<std::vector<float>> xs, weights;
  std::vector<float> x, weight;         ///< this rank's
  std::vector<float> gathered_product;  ///< AG+GEMM
  std::vector<float> sum;               ///< GEMM+AR
};

TEST_P(Public, OperatorsMatchReferenceUnderEveryStrategyAndLayout) {
  run([](Communicator& comm) {
    const Problem p(comm, 37, 24, 40);
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const OnDevice x(comm, dtype, p.local.count, p.k, p.x_rows()),
          whole_x(comm, dtype, p.m, p.k, p.x), w(comm, dtype, p.n, p.k, p.weight),
          wt(comm, dtype, p.k, p.n, transposed(p.weight, p.k)), out(comm, dtype, p.m, p.n),
          rows(comm, dtype, p.local.count, p.n);
      for (const Strategy strategy : kStrategies) {
        if (strategy == Strategy::overlapped && comm.size() == 1) continue;
        for (const bool kn : {false, true}) {
          const std::string what = fmt::format("{} {} {} of {}", name_of(strategy), name_of(dtype),
                                               kn ? "kn" : "nk", comm.size());
          const Tensor weight = kn ? wt.tensor.transposed() : w.tensor;
          AgGemm ag(comm, {p.m, p.n, p.k, dtype, true, false, kn}, {strategy, 0});
          out.poison();
          ag.run(x.tensor, weight, out.tensor);
          EXPECT_EQ(out.read(), p.gathered_product) << "ag_gemm " << what;
          EXPECT_EQ(OnDevice::read_from(comm, ag.gathered()), p.xs[0]) << what;

          GemmRs rs(comm, {p.m, p.n, p.k, dtype, false, kn}, {strategy, 0});
          rows.poison();
          rs.run(whole_x.tensor, weight, rows.tensor);
          EXPECT_EQ(rows.read(), p.sum_rows()) << "gemm_rs " << what;

          GemmAr ar(comm, {p.m, p.n, p.k, dtype, false, kn}, {strategy, 0});
          out.poison();
          ar.run(whole_x.tensor, weight, out.tensor);
          EXPECT_EQ(out.read(), p.sum) << "gemm_ar " << what;
        }
      }
    }
  });
}

TEST_P(Public, DeclaredF32OutputMatchesReference) {
  run([](Communicator& comm) {
    const Problem p(comm, 37, 24, 40);
    const OnDevice x(comm, DType::bf16, p.local.count, p.k, p.x_rows()),
        whole_x(comm, DType::bf16, p.m, p.k, p.x), w(comm, DType::bf16, p.n, p.k, p.weight),
        out(comm, DType::f32, p.m, p.n), rows(comm, DType::f32, p.local.count, p.n);
    for (const Strategy strategy : {Strategy::serial, Strategy::automatic}) {
      AgGemm ag(comm, {.m = p.m, .n = p.n, .k = p.k, .dtype = DType::bf16, .out_dtype = DType::f32},
                {strategy, 0});
      out.poison();
      ag.run(x.tensor, w.tensor, out.tensor);
      EXPECT_EQ(out.read(), p.gathered_product);
      GemmRs rs(comm, {.m = p.m, .n = p.n, .k = p.k, .dtype = DType::bf16, .out_dtype = DType::f32},
                {strategy, 0});
      rows.poison();
      rs.run(whole_x.tensor, w.tensor, rows.tensor);
      EXPECT_EQ(rows.read(), p.sum_rows());
    }
  });
}

// Serial and overlapped select candidates of their form from any implementation. If nothing
// overlaps, as with f32 sums, strategy() reports what runs.
TEST_P(Public, StrategySelectsACandidateOfItsForm) {
  if (ranks() == 1) GTEST_SKIP() << "one rank has nothing to overlap";
  run([](Communicator& comm) {
    const int64_t m = 64, n = 48, k = 80;
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped}) {
      const AgGemm ag(comm, {m, n, k, DType::bf16}, {strategy, 0});
      EXPECT_EQ(ag.strategy(), strategy);
      const GemmRs rs(comm, {m, n, k, DType::bf16}, {strategy, 0});
      EXPECT_EQ(rs.strategy(), strategy);
      const GemmAr ar(comm, {m, n, k, DType::f32}, {strategy, 0});
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
  run([](Communicator& comm) {
    const int world = comm.size(), rank = comm.rank();
    for (const int64_t rows : {int64_t(12), int64_t(13), int64_t(2)}) {
      const int64_t columns = 3;
      const Shard local = shard_of(rows, world, rank);
      const OnDevice whole(comm, DType::i32, rows, columns),
          shard(comm, DType::i32, local.count, columns);
      shard.write(values(0, local.begin * columns, local.count * columns));
      all_gather(comm, shard.tensor, whole.tensor);
      EXPECT_EQ(read_ints(comm, whole.tensor), values(0, 0, rows * columns));

      whole.write(values(rank, 0, rows * columns));
      reduce_scatter(comm, whole.tensor, shard.tensor, ReduceOp::max);
      EXPECT_EQ(read_ints(comm, shard.tensor),
                values(world - 1, local.begin * columns, local.count * columns));
      all_reduce(comm, whole.tensor, ReduceOp::max);
      EXPECT_EQ(read_ints(comm, whole.tensor), values(world - 1, 0, rows * columns));

      whole.write(values(rank, 0, rows * columns));
      broadcast(comm, whole.tensor, world - 1);
      EXPECT_EQ(read_ints(comm, whole.tensor), values(world - 1, 0, rows * columns));
    }
    for (const int64_t elements : {8, 4096, (8 << 20) + 8}) {  // own kernels, own kernels, NCCL
      const auto count = static_cast<size_t>(elements);
      std::vector<float> local(count), sum(count);
      for (size_t i = 0; i < local.size(); ++i) {
        local[i] = float(int(i % 17) - 8 + rank);
        for (int r = 0; r < world; ++r) sum[i] += float(int(i % 17) - 8 + r);
      }
      const OnDevice data(comm, DType::bf16, 1, elements, local);
      all_reduce(comm, data.tensor);
      EXPECT_TRUE(data.read() == sum) << elements;
    }
    // Rank r sends r + p + 1 rows to rank p.
    std::vector<int64_t> sends, receives;
    for (int p = 0; p < world; ++p) sends.push_back(rank + p + 1), receives.push_back(p + rank + 1);
    const int64_t total = std::accumulate(sends.begin(), sends.end(), int64_t(0));
    const OnDevice out(comm, DType::i32, total, 1), in(comm, DType::i32, total, 1);
    out.write(values(rank, 0, total));
    all_to_all(comm, out.tensor, sends, in.tensor, receives);
    std::vector<int> expected;
    for (int p = 0; p < world; ++p) {
      int64_t first = 0;
      for (int q = 0; q < rank; ++q) first += p + q + 1;
      const auto rows = values(p, first, p + rank + 1);
      expected.insert(expected.end(), rows.begin(), rows.end());
    }
    EXPECT_EQ(read_ints(comm, in.tensor), expected);
    if (world > 1 && rank < 2) {
      if (rank == 0) send(comm, out.tensor, 1);
      const int64_t sent = world * (world + 1) / 2;  // rows of rank 0
      if (rank == 1) {
        recv(comm, in.tensor.rows(0, sent), 0);
        const auto got = read_ints(comm, in.tensor.rows(0, sent));
        EXPECT_EQ(got, values(0, 0, sent));
      }
    }
  });
}

TEST_P(Public, InvalidTensorsAreNamed) {
  run([](Communicator& comm) {
    std::vector<float> host(64);
    const Tensor on_host(host.data(), DType::f32, {8, 8});
    EXPECT_THROW(all_reduce(comm, on_host), InvalidArgument);
    const OnDevice bytes(comm, DType::u8, 4, 4), data(comm, DType::f32, 8, 8);
    EXPECT_THROW(all_reduce(comm, bytes.tensor), InvalidArgument);
    EXPECT_THROW(all_gather(comm, data.tensor.rows(0, 0), bytes.tensor), InvalidArgument);
    EXPECT_THROW(broadcast(comm, data.tensor, comm.size()), InvalidArgument);
    GemmAr ar(comm, {8, 8, 8}, {Strategy::serial, 0});
    EXPECT_THROW(ar.run(on_host, data.tensor, data.tensor), InvalidArgument);
    const OnDevice out(comm, DType::f32, 8, 8);
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
      const OnDevice x(comm, DType::f32, 8, 4);
      try {
        op.run(x.tensor, weight, data.tensor);
      } catch (const InvalidArgument& error) {
        return error.what();
      }
      return "";
    };
    const OnDevice nk(comm, DType::f32, 8, 4), kn(comm, DType::f32, 4, 8);
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
  run([](Communicator& comm) {
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
  run([](Communicator& world) {
    const auto group = world.split(world.rank() % 2, -world.rank());
    Communicator& comm = *group;
    const Problem p(comm, 256 * comm.size(), 128, 512);
    const OnDevice x(comm, DType::bf16, p.local.count, p.k, p.x_rows()),
        whole_x(comm, DType::bf16, p.m, p.k, p.x), w(comm, DType::bf16, p.n, p.k, p.weight),
        out(comm, DType::bf16, p.m, p.n);
    for (const Strategy strategy : kStrategies) {
      if (strategy == Strategy::overlapped && comm.size() == 1) continue;
      AgGemm ag(comm, {p.m, p.n, p.k, DType::bf16}, {strategy, 0});
      out.poison();
      ag.run(x.tensor, w.tensor, out.tensor);
      EXPECT_EQ(out.read(), p.gathered_product) << name_of(strategy);
      GemmAr ar(comm, {p.m, p.n, p.k, DType::bf16}, {strategy, 0});
      out.poison();
      ar.run(whole_x.tensor, w.tensor, out.tensor);
      EXPECT_EQ(out.read(), p.sum) << name_of(strategy);
    }
    world.barrier("groups are done");
  });
}

// Checks cuda.h's contract of the communicator's stream, with a stream of the caller.
TEST_P(Public, CallsRunOnTheCallersStream) {
  const bool shares = shares_gpu();
  run([&](Communicator& comm) {
    int device = -1;
    check(cudaGetDevice(&device));
    EXPECT_EQ(device_of(comm), (Device{DeviceKind::cuda, device}));
    CUstream_st* const original = stream_of(comm);
    cudaStream_t local = nullptr;
    check(cudaStreamCreateWithFlags(&local, cudaStreamNonBlocking));
    set_stream(comm, local);
    EXPECT_EQ(stream_of(comm), local);
    const Problem p(comm, 64, 32, 64);
    const OnDevice x(comm, DType::f32, p.m, p.k), w(comm, DType::f32, p.n, p.k, p.weight),
        out(comm, DType::f32, p.m, p.n);
    GemmAr op(comm, {p.m, p.n, p.k, DType::f32});
    op.run(x.tensor, w.tensor, out.tensor);  // lazy initialization and loading are done
    void* pinned = nullptr;
    check(cudaMallocHost(&pinned, x.tensor.bytes()));
    std::copy(p.x.begin(), p.x.end(), static_cast<float*>(pinned));
    synchronize(comm);
    out.poison();
    // Later writes in the stream are seen by the later GEMM.
    check(cudaLaunchHostFunc(
        local, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(500)); },
        nullptr));
    check(cudaMemcpyAsync(x.memory.data(), pinned, x.tensor.bytes(), cudaMemcpyDefault, local));
    op.run(x.tensor, w.tensor, out.tensor);
    // Ranks that share a GPU wait for each other in the call, longer than the pause.
    if (!shares) {
      EXPECT_EQ(cudaStreamQuery(local), cudaErrorNotReady);
    }
    EXPECT_EQ(cudaStreamQuery(original), cudaSuccess);
    synchronize(comm);
    EXPECT_EQ(cudaStreamQuery(local), cudaSuccess);
    EXPECT_EQ(out.read(), p.sum);
    set_stream(comm, original);
    check(cudaFreeHost(pinned));
    check(cudaStreamDestroy(local));
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Public, testing::Values(1, 2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
