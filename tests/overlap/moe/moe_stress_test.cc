// Thousands of steps of one layer, each with a different routing and random delays: results do not
// depend on which ranks are late. TANDEM_TEST_MOE_STEPS sets the number of steps. Also a rank that
// never arrives.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <latch>
#include <thread>

#include "gemm/gemm.h"
#include "tandem/error.h"
#include "tests/comm/ranks.h"
#include "tests/overlap/moe/layer_case.h"

namespace tandem {
namespace {

using namespace tandem::test;

int steps_asked(int otherwise) {
  const char* text = std::getenv("TANDEM_TEST_MOE_STEPS");
  return text ? std::atoi(text) : otherwise;
}

constexpr int64_t kRows[] = {0, 1, 5, 12, 16};
constexpr double kImbalances[] = {1, 1.5, 2, 0};

/// Inputs of step `step`: one of the problems, with its own routing.
struct Step {
  size_t problem;
  std::vector<int32_t> chosen;
  Step(std::span<const Whole> problems, int step) {
    const auto r = philox(31, 1, uint64_t(step));
    problem = r[0] % problems.size();
    const LayerCase& c = problems[problem].c;
    chosen =
        chosen_experts({c.experts, c.ep, c.tp}, c.top_k,
                       {kImbalances[r[1] % std::size(kImbalances)], uint64_t(step)}, 0, c.rows);
  }
};

void come_late(uint64_t seed, int rank, int step) {
  const auto r = philox(seed, uint64_t(rank), uint64_t(step));
  if (r[0] % 4 == 0) std::this_thread::yield();
  if (r[0] % 64 == 1) std::this_thread::sleep_for(std::chrono::microseconds(r[1] % 500));
}

uint64_t digest(const RankLayer& rank) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const Owned* owned : {&rank.out, &rank.dx, &rank.dweights, &rank.dw_in, &rank.dw_out}) {
    const std::byte* const data = owned->memory.data();
    for (size_t i = 0; i < size_t(owned->tensor.elements()) * sizeof(float); ++i) {
      hash = (hash ^ uint64_t(data[i])) * 0x100000001b3;
    }
  }
  return hash;
}

/// Digests of every rank's results of every step.
std::vector<std::vector<uint64_t>> run_steps(std::span<const Whole> problems, int steps,
                                             uint64_t delays, const MoeOptions& options) {
  const LayerCase& maximum = problems.back().c;
  std::vector<std::vector<uint64_t>> digests(size_t(maximum.world()));
  WorldOptions world;
  world.ranks = maximum.world();
  run_threads(world, [&](Communicator& comm) {
    set_kernel_threads(1);
    std::vector<RankLayer> ranks;
    for (const Whole& whole : problems) ranks.emplace_back(whole, comm.rank());
    MoeLayer layer(comm, ranks.back().shape(), options);
    MoeBatch batch;
    for (int i = 0; i < steps; ++i) {
      const Step step(problems, i);
      const LayerCase& c = problems[step.problem].c;
      RankLayer& rank = ranks[step.problem];
      const Shard local = shard_of(c.rows, c.world(), comm.rank());
      std::copy_n(step.chosen.begin() + local.begin * c.top_k, local.count * c.top_k,
                  rank.chosen.begin());
      come_late(delays, comm.rank(), i);
      rank.run(layer, batch);
      digests[size_t(comm.rank())].push_back(digest(rank));
      if (i % std::max(1, steps / 20) != 0) continue;
      Whole whole = problems[step.problem];
      whole.chosen = step.chosen;
      EXPECT_LE(rank.error(moe_reference(whole.problem()),
                           moe_reference_backward(whole.problem(), whole.dout)),
                2e-5)
          << "step " << i;
    }
  });
  return digests;
}

void expect_same_bits(int steps) {
  std::vector<Whole> problems;
  for (const int64_t rows : kRows) {
    problems.emplace_back(
        LayerCase{.ep = 2, .tp = 2, .experts = 8, .top_k = 2, .rows = rows, .hidden = 8, .ffn = 8});
  }
  const auto first = run_steps(problems, steps, 1, {Strategy::overlapped, 3});
  EXPECT_EQ(run_steps(problems, steps, 2, {Strategy::overlapped, 3}), first);
  if (rows_keep_bits()) {
    EXPECT_EQ(run_steps(problems, steps / 5, 3, {Strategy::serial, 0})[0],
              std::vector(first[0].begin(), first[0].begin() + steps / 5));
  }
}

TEST(MoeStress, ChangingRoutingsWithLateRanksKeepTheirBits) {
  TANDEM_SKIP_UNDER_MPI("threads");
  expect_same_bits(steps_asked(2000));
}

TEST(MoeStressLong, ChangingRoutingsWithLateRanksKeepTheirBits) {
  TANDEM_SKIP_UNDER_MPI("threads");
  expect_same_bits(steps_asked(10000));
}

TEST(MoeStress, MissingRankIsNamedByAllOthers) {
  TANDEM_SKIP_UNDER_MPI("threads");
  const Whole whole({.ep = 4, .experts = 8, .top_k = 2, .rows = 16, .hidden = 16, .ffn = 8});
  for (const bool forward_first : {false, true}) {
    WorldOptions world;
    world.ranks = 4;
    std::latch notified(3);
    run_threads(world, [&](Communicator& comm) {
      set_kernel_threads(1);
      RankLayer rank(whole, comm.rank());
      MoeLayer layer(comm, rank.shape(), {Strategy::overlapped, 2});
      MoeBatch batch;
      const auto forward = [&] {
        layer.forward(rank.x.tensor, rank.routing(), rank.w_in.tensor, rank.w_out.tensor,
                      rank.out.tensor, batch);
      };
      if (forward_first) forward();
      comm.set_deadline(0.5);
      if (comm.rank() == 1) return notified.wait();
      std::string error = "none";
      try {
        if (!forward_first) forward();
        layer.backward(rank.dout.tensor, rank.w_in.tensor, rank.w_out.tensor, batch, rank.dx.tensor,
                       rank.dweights.tensor, rank.dw_in.tensor, rank.dw_out.tensor);
      } catch (const Timeout& timeout) {
        error = timeout.what();
        EXPECT_EQ(timeout.peer, 1) << error;
        EXPECT_EQ(timeout.op, "moe") << error;
      }
      EXPECT_NE(error, "none") << comm.rank();
      notified.count_down();
    });
  }
}

}  // namespace
}  // namespace tandem
