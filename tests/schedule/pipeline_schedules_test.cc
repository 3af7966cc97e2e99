// Properties of all pipeline schedules, for all small shapes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "schedule/pipeline_check.h"
#include "schedule/pipeline_simulation.h"
#include "tandem/error.h"

namespace tandem::schedule {
namespace {

constexpr PassKind kF = PassKind::forward, kB = PassKind::backward, kI = PassKind::backward_input,
                   kW = PassKind::backward_weight;
constexpr double kRounding = 1e-9;

bool exists(const PipelineShape& shape) {
  try {
    check_pipeline(shape);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

/// All shapes of up to 8 ranks, 64 microbatches and 4 chunks.
std::vector<PipelineShape> small_shapes(PipelineKind kind) {
  std::vector<PipelineShape> shapes;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int microbatches = 1; microbatches <= 64; ++microbatches) {
      for (int chunks = 1; chunks <= 4; ++chunks) {
        const PipelineShape shape{kind, ranks, microbatches, chunks};
        if (exists(shape)) shapes.push_back(shape);
      }
    }
  }
  return shapes;
}

std::string describe(const PipelineShape& shape) {
  return fmt::format("{} of {} ranks, {} microbatches, {} chunks", name_of(shape.kind), shape.ranks,
                     shape.microbatches, shape.chunks);
}

/// F, B, I (backward_input) and W (backward_weight) of a rank with microbatches; small letters for
/// chunk 1.
std::string letters(const PipelineShape& shape, int rank) {
  std::string text;
  for (const PipelineAction& action : pipeline_actions(shape, rank)) {
    const std::string_view names = action.chunk == 0 ? "FBIW" : "fbiw";
    text += fmt::format("{}{}{}", text.empty() ? "" : " ", names[size_t(action.pass)],
                        action.microbatch);
  }
  return text;
}

TEST(PipelineSchedules, OrderIsThatOfTheirSources) {
  const PipelineShape interleaved{PipelineKind::interleaved, 2, 4, 2};
  EXPECT_EQ(letters(interleaved, 0), "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3");
  EXPECT_EQ(letters(interleaved, 1), "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3");
  const PipelineShape h1{PipelineKind::zb_h1, 3, 4};
  EXPECT_EQ(letters(h1, 0), "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3");
  EXPECT_EQ(letters(h1, 2), "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3");
  const PipelineShape v{PipelineKind::zb_v, 2, 3, 2};
  EXPECT_EQ(letters(v, 0), "F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2");
  EXPECT_EQ(letters(v, 1), "F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2");
  const PipelineShape dualpipe{PipelineKind::dualpipe_v, 2, 4, 2};
  EXPECT_EQ(letters(dualpipe, 0), "F0 F1 F2 f0 i0 w0 f1 F3 b1 f2 B0 b2 f3 B1 b3 I2 W2 I3 W3");
  EXPECT_EQ(letters(dualpipe, 1), "F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 i3 I3 w3 W3");
}

TEST(PipelineSchedules, KeepTheRules) {
  size_t count = 0;
  for (const PipelineKind kind : pipeline_kinds()) {
    for (const PipelineShape& shape : small_shapes(kind)) {
      ASSERT_EQ(find_violation(shape, pipeline_actions(shape)), "") << describe(shape);
      ++count;
    }
  }
  // 512 of each of those that take any number of microbatches.
  const size_t interleaved = 3 * (64 + 32 + 21 + 16 + 12 + 10 + 9 + 8),
               dualpipe = 8 * 64 - (1 + 3 + 5 + 7 + 9 + 11 + 13 + 15);
  EXPECT_EQ(count, 4 * 512 + interleaved + dualpipe);
}

TEST(PipelineSchedules, EveryStageIsOnOneRank) {
  for (const PipelineKind kind : pipeline_kinds()) {
    const PipelineShape shape{kind, 4, 8, min_chunks(kind)};
    std::vector<int> ranks;
    for (int stage = 0; stage < shape.stages(); ++stage) {
      const StagePosition found = position_of(shape, stage);
      EXPECT_EQ(stage_of(shape, found.rank, found.chunk), stage) << describe(shape);
      ranks.push_back(found.rank);
    }
    if (kind == PipelineKind::interleaved) {
      EXPECT_EQ(ranks, (std::vector{0, 1, 2, 3, 0, 1, 2, 3}));
    } else if (shape.chunks == 2) {
      EXPECT_EQ(ranks, (std::vector{0, 1, 2, 3, 3, 2, 1, 0})) << describe(shape);
    }
  }
}

TEST(PipelineSchedules, StoreNoMoreThanOneForwardOneBackward) {
  for (const PipelineKind kind : {PipelineKind::zb_h1, PipelineKind::zb_v}) {
    for (const PipelineShape& shape : small_shapes(kind)) {
      const PipelineShape usual{PipelineKind::one_f_one_b, shape.ranks, shape.microbatches};
      for (int rank = 0; rank < shape.ranks; ++rank) {
        EXPECT_LE(peak_activations(shape, rank), shape.chunks * peak_activations(usual, 0))
            << describe(shape);
      }
    }
  }
}

TEST(PipelineSchedules, BubbleIsThePublishedOne) {
  for (const PipelineKind kind : pipeline_kinds()) {
    for (const PipelineShape& shape : small_shapes(kind)) {
      const PipelineTimes times = simulate(shape, pipeline_actions(shape));
      const int ranks = shape.ranks, microbatches = shape.microbatches;
      const double published = published_bubble(shape);
      switch (kind) {
        case PipelineKind::gpipe:
        case PipelineKind::one_f_one_b:
          EXPECT_NEAR(published, (ranks - 1.0) / (microbatches + ranks - 1), kRounding);
          break;
        case PipelineKind::interleaved:
          EXPECT_NEAR(published, (ranks - 1.0) / (microbatches * shape.chunks + ranks - 1),
                      kRounding);
          break;
        case PipelineKind::zb_h1:
          EXPECT_NEAR(published, (ranks - 1.0) / (3 * microbatches + ranks - 1), kRounding);
          if (microbatches < ranks) continue;
          break;
        case PipelineKind::zb_v:
          EXPECT_NEAR(published, (ranks - 1.0) / (6 * microbatches + ranks - 1), kRounding);
          if (microbatches < 2 * ranks - 1) continue;
          EXPECT_NEAR(times.inner_bubble, 0, kRounding) << describe(shape);
          break;
        case PipelineKind::dualpipe_v:
          // Half of the published idle time, see published_bubble_time.
          EXPECT_NEAR(published, 2 * (ranks - 1.0) / (6 * microbatches + 2 * (ranks - 1)),
                      kRounding);
          EXPECT_NEAR(times.makespan, 6 * microbatches + ranks - 1, kRounding) << describe(shape);
          continue;
      }
      EXPECT_NEAR(times.bubble, published, kRounding) << describe(shape);
    }
  }
}

TEST(PipelineSchedules, BubbleOfUnequalCostsIsThePublishedOne) {
  const PassCosts costs{.forward = 5, .backward_input = 4, .backward_weight = 3};
  for (const PipelineKind kind : {PipelineKind::gpipe, PipelineKind::one_f_one_b,
                                  PipelineKind::interleaved, PipelineKind::zb_h1}) {
    const PipelineShape shape{kind, 4, 12, min_chunks(kind)};
    EXPECT_NEAR(simulate(shape, pipeline_actions(shape), costs).bubble,
                published_bubble(shape, costs), kRounding)
        << describe(shape);
  }
  const PipelineShape dualpipe{PipelineKind::dualpipe_v, 4, 12, 2};
  EXPECT_NEAR(simulate(dualpipe, pipeline_actions(dualpipe), costs).makespan,
              12 * 2 * 12 + 3 * (5 + 4 - 3), kRounding);
}

TEST(PipelineSchedules, TooFewMicrobatchesLeaveALargerBubble) {
  const PipelineShape h1{PipelineKind::zb_h1, 4, 3}, v{PipelineKind::zb_v, 4, 5, 2};
  EXPECT_GT(simulate(h1, pipeline_actions(h1)).bubble, published_bubble(h1) + 0.01);
  EXPECT_GT(simulate(v, pipeline_actions(v)).inner_bubble, 0.01);
}

TEST(PipelineSimulation, TransfersDelayOnlyOtherRanks) {
  // F0 on rank 0, transfer, F1 and B1 on rank 1, transfer, B0.
  const PipelineShape chain{PipelineKind::one_f_one_b, 2, 1};
  const PassCosts costs{.forward = 2, .backward_input = 3, .backward_weight = 1, .transfer = 10};
  const PipelineTimes times = simulate(chain, pipeline_actions(chain), costs);
  EXPECT_EQ(times.passes[1][0].begin, 12);
  EXPECT_EQ(times.passes[0][1].begin, 28);
  EXPECT_EQ(times.makespan, 32);
  EXPECT_EQ(times.bubble, 1 - 12 / 64.0);
  EXPECT_EQ(times.inner_bubble, 1 - 6 / 32.0);
  // The turn of the V is on one rank.
  const PipelineShape turn{PipelineKind::zb_v, 1, 1, 2};
  EXPECT_EQ(simulate(turn, pipeline_actions(turn), costs).makespan, 12);
}

TEST(PipelineSimulation, RecomputationDelaysTheInputsGradient) {
  // F0 on rank 0, F1, then recomputation and B1 on rank 1, recomputation and B0.
  const PipelineShape chain{PipelineKind::one_f_one_b, 2, 1};
  const PassCosts costs{
      .forward = 2, .backward_input = 3, .backward_weight = 1, .transfer = 0, .recompute = 2};
  const PipelineTimes times = simulate(chain, pipeline_actions(chain), costs);
  EXPECT_EQ(times.passes[1][1].end - times.passes[1][1].begin, 6);
  EXPECT_EQ(times.makespan, 16);
  for (const PipelineKind kind : {PipelineKind::gpipe, PipelineKind::one_f_one_b,
                                  PipelineKind::interleaved, PipelineKind::zb_h1}) {
    const PipelineShape shape{kind, 4, 12, min_chunks(kind)};
    PassCosts longer = costs;  // the same passes
    longer.backward_input += std::exchange(longer.recompute, 0);
    const PipelineTimes found = simulate(shape, pipeline_actions(shape), costs);
    EXPECT_EQ(found.makespan, simulate(shape, pipeline_actions(shape), longer).makespan);
    EXPECT_NEAR(found.bubble, published_bubble(shape, costs), kRounding);
  }
}

TEST(PipelineCheck, FindsEveryBrokenRule) {
  const PipelineShape shape{PipelineKind::zb_h1, 2, 2};
  const auto good = pipeline_actions(shape);
  ASSERT_EQ(good[0], (std::vector<PipelineAction>{
                         {kF, 0, 0}, {kF, 0, 1}, {kI, 0, 0}, {kW, 0, 0}, {kI, 0, 1}, {kW, 0, 1}}));
  auto actions = good;
  actions.pop_back();
  EXPECT_EQ(find_violation(shape, actions), "lists of 1 ranks: expected 2");
  actions = good;
  actions[0].pop_back();
  EXPECT_EQ(find_violation(shape, actions),
            "rank 0: chunk 0, microbatch 1 has 1 forward, 0 backward, 1 backward_input and 0 "
            "backward_weight passes: expected one of each, backward either whole or split");
  actions = good;
  actions[1].push_back({kB, 0, 0});
  EXPECT_NE(find_violation(shape, actions), "");
  actions = good;
  actions[1].push_back({kF, 1, 0});
  EXPECT_EQ(find_violation(shape, actions),
            "rank 1: forward of chunk 1, microbatch 0: expected chunks below 1 and microbatches "
            "below 2");
  actions = good;
  std::swap(actions[0][2], actions[0][3]);
  EXPECT_EQ(find_violation(shape, actions),
            "rank 0: backward_weight of chunk 0, microbatch 0 waits forever");
  // Each rank waits for the other: rank 1 for the second microbatch first.
  actions = good;
  std::swap(actions[0][1], actions[0][2]);
  std::swap(actions[1][0].microbatch, actions[1][2].microbatch);
  EXPECT_NE(find_violation(shape, actions).find("waits forever"), std::string::npos);
  // All forward passes first.
  const PipelineShape one{PipelineKind::one_f_one_b, 2, 4}, all{PipelineKind::gpipe, 2, 4};
  EXPECT_EQ(find_violation(one, pipeline_actions(all)), "rank 0 stores 4 activations: expected 2");
}

TEST(PipelineSchedules, ImpossibleShapesAreRefused) {
  const auto reason = [](const PipelineShape& shape) -> std::string {
    try {
      check_pipeline(shape);
      return "";
    } catch (const ConfigError& error) {
      return error.what();
    }
  };
  EXPECT_EQ(reason({PipelineKind::interleaved, 4, 6, 2}),
            "schedule \"interleaved\" with 6 microbatches: expected a multiple of its 4 ranks");
  EXPECT_EQ(reason({PipelineKind::interleaved, 4, 8, 1}),
            "schedule \"interleaved\" with 1 stages per rank: expected at least 2");
  EXPECT_EQ(reason({PipelineKind::dualpipe_v, 4, 7, 2}),
            "schedule \"dualpipe-v\" with 7 microbatches: expected at least 8, twice its ranks");
  EXPECT_EQ(reason({PipelineKind::zb_v, 4, 8, 3}),
            "schedule \"zb-v\" with 3 stages per rank: expected 2");
  EXPECT_EQ(reason({PipelineKind::zb_h1, 4, 8, 2}),
            "schedule \"zb-h1\" with 2 stages per rank: expected 1");
  EXPECT_EQ(reason({PipelineKind::zb_v, 4, 1, 2}), "");
}

}  // namespace
}  // namespace tandem::schedule
