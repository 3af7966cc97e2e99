// Every layout computes what one rank does: gradients of the first step, and weights after three
// clipped steps.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <string>

#include "engine/check/layout_check.h"
#include "generated_layouts.h"

namespace tandem {
namespace {

constexpr int kSteps = 3;
constexpr double kWeightBound = 1e-5;
constexpr uint64_t kSeed = 5;
constexpr size_t kShort = 25, kLong = 500;

struct Worst {
  double relative = 0;
  std::string tensor, layout;
  void add(const TensorDifference& difference, const TrainConfig& config) {
    if (difference.relative <= relative) return;
    *this = {difference.relative, difference.tensor, describe_layout(config)};
  }
};

/// Outcomes on one rank, which many layouts share.
class OneRank {
 public:
  const StepsOutcome& outcome(const TrainConfig& config) {
    const TrainConfig one = one_rank_config(config);
    const std::string key =
        fmt::format("{}\n{} {}", to_toml(one), config.parallel.dp, config.train.microbatch);
    const auto found = outcomes_.find(key);
    if (found != outcomes_.end()) return found->second;
    return outcomes_[key] = run_steps({one, config, kSteps}, tiny_corpus());
  }

 private:
  std::map<std::string, StepsOutcome> outcomes_;
};

void expect_one_rank(std::span<const TrainConfig> layouts) {
  OneRank one_rank;
  Worst gradients, weights;
  for (const TrainConfig& config : layouts) {
    SCOPED_TRACE(describe_layout(config));
    const StepsOutcome& expected = one_rank.outcome(config);
    const StepsOutcome found = run_steps({config, config, kSteps}, tiny_corpus());
    EXPECT_GT(expected.grad_norm, config.optimizer.grad_clip) << "no step is clipped";
    const TensorDifference gradient = compare_steps(found, expected).front();
    EXPECT_LE(gradient.relative, layout_bound(config)) << gradient.tensor;
    const TensorDifference weight = compare_tensors(found.weights, expected.weights).front();
    EXPECT_LE(weight.relative, kWeightBound) << weight.tensor;
    gradients.add(gradient, config);
    weights.add(weight, config);
  }
  fmt::print("{} layouts\n  gradients  {:.2e}  {}  {}\n  weights    {:.2e}  {}  {}\n",
             layouts.size(), gradients.relative, gradients.tensor, gradients.layout,
             weights.relative, weights.tensor, weights.layout);
}

TEST(Layouts, GeneratorCoversEverySizeScheduleAndModel) {
  const std::vector<TrainConfig> layouts = generate_layouts(kSeed);
  ASSERT_GE(layouts.size(), kLong);
  std::set<std::string> names, schedules;
  for (const TrainConfig& config : layouts) {
    names.insert(describe_layout(config));
    if (config.parallel.pp > 1) schedules.insert(config.parallel.schedule);
  }
  fmt::print("{} layouts\n", layouts.size());
  EXPECT_EQ(names.size(), layouts.size()) << "two layouts are the same";
  EXPECT_EQ(schedules.size(), 6u);
  EXPECT_EQ(layout_bound(layouts.front()), 2e-6);
}

TEST(Layouts, ComputeWhatOneRankDoes) {
  const std::vector<TrainConfig> layouts = generate_layouts(kSeed);
  expect_one_rank(std::span(layouts).first(kShort));
}

TEST(LayoutsLong, ComputeWhatOneRankDoes) {
  const std::vector<TrainConfig> layouts = generate_layouts(kSeed);
  expect_one_rank(std::span(layouts).first(kLong));
}

}  // namespace
}  // namespace tandem
