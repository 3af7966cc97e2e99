// The layer compared with the slow f64 reference, over generated shapes, layouts and imbalances:
// every result, forward and backward, has the same bits in every run and with every strategy.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "gemm/gemm.h"
#include "overlap/moe/cpu/layer.h"
#include "tests/comm/ranks.h"
#include "tests/overlap/moe/layer_case.h"

namespace tandem {
namespace {

using namespace tandem::test;

double bound_of(const LayerCase& c) {
  return c.dtype == DType::f32 ? 2e-5 : 4e-2;
}

/// Results of each strategy on this rank, compared with the reference and with a second run.
std::vector<std::vector<float>> run_rank(Communicator& comm, const Whole& whole,
                                         const std::vector<double>& reference,
                                         const MoeGradients& gradients, const MoeOptions& options) {
  set_kernel_threads(1);
  RankLayer rank(whole, comm.rank());
  MoeLayer layer(comm, rank.shape(), options);
  MoeBatch batch;
  rank.run(layer, batch);
  EXPECT_LE(rank.error(reference, gradients), bound_of(whole.c)) << whole.c.describe();
  const auto first = rank.results();
  rank.run(layer, batch);
  EXPECT_EQ(rank.results(), first) << whole.c.describe() << ": a second run has other bits";
  return first;
}

void check_case(Communicator& comm, const Whole& whole, const std::vector<double>& reference,
                const MoeGradients& gradients, int chunks) {
  const auto serial = run_rank(comm, whole, reference, gradients, {Strategy::serial, 0});
  const auto overlapped =
      run_rank(comm, whole, reference, gradients, {Strategy::overlapped, chunks});
  if (rows_keep_bits()) {
    EXPECT_EQ(overlapped, serial) << whole.c.describe() << ", " << chunks << " chunks";
  }
}

class Moe : public testing::TestWithParam<Cases> {};
std::vector<Cases> worlds(int begin, int end) {
  std::vector<Cases> all;
  for (int ranks = 1; ranks <= 8; ++ranks) all.push_back({ranks, begin, end});
  return all;
}
// 30: every number of chunks with and without a link.
INSTANTIATE_TEST_SUITE_P(Worlds, Moe, testing::ValuesIn(worlds(0, 30)), world_name);
INSTANTIATE_TEST_SUITE_P(WorldsLong, Moe, testing::ValuesIn(worlds(30, 65)), world_name);

TEST_P(Moe, MatchesReferenceAndKeepsItsBits) {
  TANDEM_SKIP_UNDER_MPI("worlds of its own");
  const auto [ranks, begin, end] = GetParam();
  const std::vector<LayerCase> cases = generated(ranks, end);
  for (int index = begin; index < end; ++index) {
    const Whole whole(cases[size_t(index)]);
    const auto reference = moe_reference(whole.problem());
    const auto gradients = moe_reference_backward(whole.problem(), whole.dout);
    WorldOptions options;
    options.ranks = ranks;
    if (index % 5 == 4) options.link = EmulatedLink{1e9, 2e-5};
    run_threads(options, [&](Communicator& comm) {
      check_case(comm, whole, reference, gradients, index % 6);
    });
    if (HasFailure()) return;
  }
}

/// One row after another of those that have experts, at the front of a rank's operands.
int64_t move_real_rows_to_front(const LayerCase& c, RankLayer& rank) {
  const auto k = size_t(c.top_k);
  const std::vector<float> x = rank.x.values(), dout = rank.dout.values();
  int64_t to = 0;
  for (size_t row = 0; row * k < rank.chosen.size(); ++row) {
    if (rank.chosen[row * k] < 0) continue;
    for (size_t i = 0; i < k; ++i) {
      rank.chosen[size_t(to) * k + i] = rank.chosen[row * k + i];
      rank.weights[size_t(to) * k + i] = rank.weights[row * k + i];
    }
    for (int64_t j = 0; j < c.hidden; ++j) {
      rank.x.set(to, j, x[row * size_t(c.hidden) + size_t(j)]);
      rank.dout.set(to, j, dout[row * size_t(c.hidden) + size_t(j)]);
    }
    ++to;
  }
  return to;
}

/// Runs the first `rows` rows only.
void run_front(RankLayer& rank, int64_t rows, MoeLayer& layer) {
  MoeBatch batch;
  const auto front = [rows](const Owned& all) { return all.tensor.rows(0, rows); };
  std::memset(rank.dw_in.memory.data(), 0, rank.dw_in.memory.bytes());
  std::memset(rank.dw_out.memory.data(), 0, rank.dw_out.memory.bytes());
  const MoeRouting all = rank.routing();
  layer.forward(front(rank.x), {all.experts.rows(0, rows), all.weights.rows(0, rows)},
                rank.w_in.tensor, rank.w_out.tensor, front(rank.out), batch);
  layer.backward(front(rank.dout), rank.w_in.tensor, rank.w_out.tensor, batch, front(rank.dx),
                 front(rank.dweights), rank.dw_in.tensor, rank.dw_out.tensor);
}

/// Row by row: those of `rank` that have experts are the first ones of `without`, the others zeros.
void expect_rows_of(const LayerCase& c, const RankLayer& rank, const RankLayer& without) {
  const auto compare = [&](const Owned& a, const Owned& b) {
    const std::vector<float> found = a.values(), expected = b.values();
    const auto width = size_t(a.tensor.dim(1));
    size_t next = 0;
    for (size_t row = 0; row * width < found.size(); ++row) {
      const bool is_real = rank.chosen[row * size_t(c.top_k)] >= 0;
      for (size_t i = 0; i < width; ++i) {
        ASSERT_EQ(found[row * width + i], is_real ? expected[next * width + i] : 0)
            << c.describe() << ", row " << row;
      }
      next += is_real;
    }
  };
  compare(rank.out, without.out);
  compare(rank.dx, without.dx);
  compare(rank.dweights, without.dweights);
  EXPECT_EQ(rank.dw_in.values(), without.dw_in.values()) << c.describe();
  EXPECT_EQ(rank.dw_out.values(), without.dw_out.values()) << c.describe();
}

TEST(MoeLayer, RowsWithoutExpertsAreAsIfLeftOut) {
  TANDEM_SKIP_UNDER_MPI("threads");
  for (const int ranks : {1, 2, 3, 4}) {
    int index = 0;
    for (const LayerCase& c : generated(ranks, 24)) {
      Whole whole(c);
      const double share = 0.1 * (index % 11);  // the last: of all rows
      for (int64_t row = 0; row < c.rows; ++row) {
        if (double(uniform(8, uint64_t(index), uint64_t(row))) >= share) continue;
        std::fill_n(whole.chosen.begin() + row * c.top_k, c.top_k, -1);
        std::fill_n(whole.weights.begin() + row * c.top_k, c.top_k, NAN);
      }
      const auto reference = moe_reference(whole.problem());
      const auto gradients = moe_reference_backward(whole.problem(), whole.dout);
      WorldOptions options;
      options.ranks = ranks;
      run_threads(options, [&](Communicator& comm) {
        set_kernel_threads(1);
        RankLayer rank(whole, comm.rank()), without(whole, comm.rank());
        MoeLayer layer(comm, rank.shape(),
                       {index % 2 == 0 ? Strategy::serial : Strategy::overlapped, 0});
        MoeBatch batch;
        rank.run(layer, batch);
        EXPECT_LE(rank.error(reference, gradients), bound_of(c)) << c.describe();
        run_front(without, move_real_rows_to_front(c, without), layer);
        expect_rows_of(c, rank, without);
      });
      ++index;
      if (HasFailure()) return;
    }
  }
}

TEST(MoeOverMpi, MatchesReferenceAndKeepsItsBits) {
  Communicator* world = mpi_world();
  if (!world) GTEST_SKIP() << "under mpirun";
  int index = 0;
  for (const LayerCase& c : generated(world->size(), 25)) {
    const Whole whole(c);
    const auto reference = moe_reference(whole.problem());
    const auto gradients = moe_reference_backward(whole.problem(), whole.dout);
    check_case(*world, whole, reference, gradients, index++ % 6);
  }
}

TEST(MoeLayer, OneLayerServesManyRoutings) {
  TANDEM_SKIP_UNDER_MPI("threads");
  LayerCase c{.ep = 2, .tp = 2, .experts = 6, .top_k = 2, .rows = 40, .hidden = 24, .ffn = 16};
  WorldOptions options;
  options.ranks = 4;
  std::vector<Whole> problems;
  for (const double imbalance : {1.0, 2.0, 0.0}) {
    c.imbalance = imbalance;
    problems.emplace_back(c);
  }
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    RankLayer first(problems[0], comm.rank());
    MoeLayer layer(comm, first.shape(), {Strategy::overlapped, 3});
    MoeBatch batch;
    for (int i = 0; i < 30; ++i) {
      const Whole& whole = problems[size_t(i % 3)];
      RankLayer rank(whole, comm.rank());
      rank.run(layer, batch);
      EXPECT_LE(rank.error(moe_reference(whole.problem()),
                           moe_reference_backward(whole.problem(), whole.dout)),
                bound_of(whole.c));
    }
  });
}

/// Every imbalance level has a different plan, and the ranks' routings differ so much that they
/// send in other waves than they multiply in.
TEST(MoeLayer, PlansThatDependOnTheImbalanceKeepTheBits) {
  TANDEM_SKIP_UNDER_MPI("threads");
  std::set<int> levels;
  int others = 0;
  for (const LayerCase& of : generated(4, 40)) {
    LayerCase c = of;
    c.ep = 4;
    c.tp = 1;
    c.experts = 4 * (2 + c.experts % 3);
    c.imbalance = std::min(c.imbalance, 4.0);
    const Whole whole(c);
    const auto reference = moe_reference(whole.problem());
    const auto gradients = moe_reference_backward(whole.problem(), whole.dout);
    WorldOptions options;
    options.ranks = 4;
    run_threads(options, [&](Communicator& comm) {
      set_kernel_threads(1);
      RankLayer rank(whole, comm.rank());
      MoeLayerOnRanks layer(comm, rank.shape(), {Strategy::serial, 0});
      MoeRows rows;
      rank.run(layer, rows);
      const auto serial = rank.results();
      for (int i = 0; i < MoeLayerOnRanks::kStages; ++i) {
        const auto stage = MoeLayerOnRanks::Stage(i);
        for (int level = 0; level < layer.levels(); ++level) {
          constexpr OverlapOptions kPlans[] = {{Strategy::overlapped, 5},
                                               {Strategy::overlapped, 2},
                                               {Strategy::serial, 1},
                                               {Strategy::overlapped, 1},
                                               {Strategy::overlapped, 3}};
          layer.set_plan(stage, level, kPlans[(level + i) % 5]);
        }
      }
      rank.run(layer, rows);
      EXPECT_LE(rank.error(reference, gradients), bound_of(c)) << c.describe();
      if (rows_keep_bits()) {
        EXPECT_EQ(rank.results(), serial) << c.describe();
      }
      if (comm.rank() != 0) return;
      levels.insert(rows.level);
      const schedule::MoeGrid grid{c.experts, 4, 1};
      const double local = schedule::moe_imbalance(rows.loads().data(), 4);
      others += schedule::moe_level(grid, c.top_k, local) != rows.level;
    });
  }
  EXPECT_GE(levels.size(), 3u);
  EXPECT_GE(others, 5);  // rank 0's own imbalance level differs from that of all rows
}

TEST(MoeLayer, MeasuresAndReportsItsChoice) {
  TANDEM_SKIP_UNDER_MPI("threads");
  const Whole whole({.ep = 2, .experts = 4, .top_k = 2, .rows = 64, .hidden = 64, .ffn = 32});
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    RankLayer rank(whole, comm.rank());
    MoeLayer layer(comm, rank.shape());
    MoeBatch batch;
    rank.run(layer, batch);
    EXPECT_LE(rank.error(moe_reference(whole.problem()),
                         moe_reference_backward(whole.problem(), whole.dout)),
              1e-5);
    EXPECT_NE(layer.dispatch_strategy(), Strategy::automatic);
    EXPECT_NE(layer.combine_strategy(), Strategy::automatic);
    int64_t rows = 0;
    for (const int64_t count : batch.rows_of_experts()) rows += count;
    EXPECT_EQ(rows, std::ranges::count_if(whole.chosen, [&](int32_t e) {
                return e / 2 == comm.rank();  // four experts on two ranks
              }));
  });
}

}  // namespace
}  // namespace tandem
