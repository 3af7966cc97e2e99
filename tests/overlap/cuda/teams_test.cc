// Worlds of more ranks than can map each other's memory: 16 on one GPU, as two teams of 8. Covers
// collectives and dense operators, whose data moves as between nodes, and single teams, whose
// operators are those of a node.
#include <fmt/format.h>

#include <numeric>
#include <string>
#include <vector>

#include "core/system/env.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gather/cuda/multi_node.h"
#include "overlap/registry.h"
#include "tandem/collectives.h"
#include "tandem/overlap.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/operands.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Teams : public testing::Test {
 protected:
  static constexpr int kRanks = 2 * kMaxGpus;
  void SetUp() override {
    if (ranks_per_gpu(kRanks) > 1 && !has_gpus_for(kRanks)) GTEST_SKIP() << "needs one GPU alone";
  }
  void run(const std::function<void(GpuCommunicator&)>& body) {
    run_gpus({kRanks, {}, 20, ranks_per_gpu(kRanks)},
             [&](Communicator& comm) { body(as_gpu(comm)); });
  }
};

std::vector<int> ints(int64_t count, int from) {
  std::vector<int> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), from);
  return values;
}

TEST_F(Teams, MapOnlyMemoryOfTheirOwnRanks) {
  run([](GpuCommunicator& comm) {
    EXPECT_FALSE(comm.one_node());
    const auto team = comm.split(comm.rank() / kMaxGpus, comm.rank());
    EXPECT_TRUE(as_gpu(*team).one_node());
    const auto across = comm.split(comm.rank() % kMaxGpus, comm.rank());
    ASSERT_EQ(across->size(), 2);
    EXPECT_FALSE(as_gpu(*across).one_node());
    const auto buffer = comm.allocate(64, 1), of_team = team->allocate(64, 1);
    for (int r = 0; r < comm.size(); ++r) {
      EXPECT_EQ(buffer->peer(r) != nullptr, r == comm.rank());
    }
    for (int r = 0; r < team->size(); ++r) EXPECT_NE(of_team->peer(r), nullptr);
  });
}

TEST_F(Teams, CollectivesMatchReference) {
  run([](GpuCommunicator& comm) {
    const int rank = comm.rank(), size = comm.size();
    for (const int64_t rows : {int64_t(1), int64_t(37), int64_t(5000)}) {
      const Matrix data(DType::i32, rows, 3), shard_memory(DType::i32, rows, 3);
      auto* words = static_cast<int*>(data.tensor.data());
      const auto sum_of = [&](int i) { return size * i + 7 * size * (size - 1) / 2; };
      write(comm, words, ints(rows * 3, 7 * rank));
      all_reduce(comm, data.tensor);
      auto got = read<int>(comm, data.tensor);
      for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], sum_of(int(i)));
      const Shard local = shard_of(rows, size, rank);
      const Tensor shard = shard_memory.tensor.rows(0, local.count);
      write(comm, words, ints(rows * 3, 7 * rank));
      reduce_scatter(comm, data.tensor, shard);
      got = read<int>(comm, shard);
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i], sum_of(int(local.begin) * 3 + int(i)));
      }
      write(comm, words, std::vector<int>(size_t(rows * 3), -1));
      all_gather(comm, shard, data.tensor);
      got = read<int>(comm, data.tensor);
      for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], sum_of(int(i)));
      if (rank == 11) write(comm, words, ints(rows * 3, 5));
      broadcast(comm, data.tensor, 11);
      EXPECT_EQ(read<int>(comm, data.tensor), ints(rows * 3, 5));
    }
    // Rank r sends r + p + 1 rows to rank p.
    std::vector<int64_t> counts;
    for (int p = 0; p < size; ++p) counts.push_back(rank + p + 1);
    const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t(0));
    const Matrix sent(DType::i32, all, 2), received(DType::i32, all, 2);
    std::vector<int> values, expected;
    for (int p = 0; p < size; ++p) {
      values.insert(values.end(), size_t(2 * counts[size_t(p)]), 100 * rank + p);
      expected.insert(expected.end(), size_t(2 * counts[size_t(p)]), 100 * p + rank);
    }
    write(comm, sent.tensor.data(), values);
    all_to_all(comm, sent.tensor, counts, received.tensor, counts);
    EXPECT_EQ(read<int>(comm, received.tensor), expected);
    // Sends to the other team.
    const Matrix word(DType::i32, 1, 1);
    write(comm, word.tensor.data(), std::vector<int>{rank});
    if (rank < kMaxGpus) send(comm, word.tensor, rank + kMaxGpus);
    if (rank >= kMaxGpus) recv(comm, word.tensor, rank - kMaxGpus);
    EXPECT_EQ(read<int>(comm, word.tensor)[0], rank % kMaxGpus);
  });
}

// Every candidate, also replayed calls, with equal bits on each repeat.
TEST_F(Teams, OperatorsMatchReference) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const int64_t m : {int64_t(5), int64_t(16), int64_t(301), int64_t(1024)}) {
      for (const char* op : {"ag_gemm", "gemm_rs", "gemm_ar"}) {
        OpDesc shape{m, 136, 72};
        shape.op = op;
        shape.collective = find_operator(op)->collective;
        shape.local_n = shape.op == "ag_gemm";
        AcrossNodes across(comm, lt, shape);
        const Operands o = shape.local_n ? ag_operands(comm, shape, 3)
                                         : sum_operands(comm, shape, shape.op == "gemm_rs", 4);
        for (const Candidate& candidate : across.candidates()) {
          if (!candidate.refusal.empty()) continue;
          std::vector<uint64_t> digests;
          for (int i = 0; i < 3; ++i) {
            poison(o.out, comm.stream());
            candidate.run({o.x, o.weight, o.out});
            digests.push_back(digest(o.out, comm.stream()));
          }
          const std::string what = fmt::format("{} {} of M {}", op, candidate.name, m);
          expect_right(comm, o, what, candidate.name);
          EXPECT_EQ(digests, std::vector<uint64_t>(3, digests[0])) << what;
        }
      }
    }
  });
}

TEST_F(Teams, PublicOperatorsMatchReferenceUnderEveryStrategy) {
  run([](GpuCommunicator& comm) {
    const OpDesc shape{200, 64, 64};
    const Operands o = sum_operands(comm, shape, true, 4);
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
      tandem::GemmRs rs(comm, {.m = 200, .n = 64, .k = 64, .dtype = DType::bf16}, {strategy, 0});
      poison(o.out, comm.stream());
      rs.run(o.x, o.weight, o.out);
      expect_right(comm, o, std::string(name_of(strategy)), kNccl);
    }
  });
}

TEST_F(Teams, FusedOperatorRunsWithinATeam) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const auto split = comm.split(comm.rank() / kMaxGpus, comm.rank());
    GpuCommunicator& team = as_gpu(*split);
    const LtContext lt;
    const OpDesc shape{1001, 264, 520};
    gpu::AgGemm ag(team, lt, shape);
    const auto fused = candidates_of(ag, "fused");
    ASSERT_GT(fused.size(), 0u);
    const Operands o = ag_operands(team, shape, 3);
    for (const Candidate& candidate : fused) {
      for (int i = 0; i < 5; ++i) candidate.run({o.x, o.weight, o.out});
      expect_right(team, o, candidate.name);
    }
  });
}

TEST_F(Teams, WaitNamesTheAbsentRankOfTheOtherTeam) {
  try {
    run_gpus({kRanks, {}, 5, ranks_per_gpu(kRanks)}, [&](Communicator& any) {
      GpuCommunicator& comm = as_gpu(any);
      const Matrix data(DType::i32, 64, 3);
      comm.barrier("all are ready");
      if (comm.rank() + 1 != comm.size()) {
        comm.set_deadline(0.5);
        all_reduce(comm, data.tensor);
        comm.synchronize();
        ADD_FAILURE() << "the wait ended";
      }
      comm.barrier("never reached by the others");
    });
    ADD_FAILURE() << "no error";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peer, kRanks - 1);
  }
}

}  // namespace
}  // namespace tandem::test
