// A new optimizer needs a row with its update: then it runs sharded, in buckets, with the learning
// rates of patterns, like the others.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/config/section.h"
#include "engine/optim/optimizer.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "tandem/world.h"
#include "tests/flat.h"

namespace tandem::test {
namespace {

/// w -= lr * sign(gradient).
void update_sign(const Exec&, const AdamStep& step, bool, double, const AdamState& state,
                 const Tensor& gradient, const Tensor&) {
  for (int64_t i = 0; i < gradient.elements(); ++i) {
    const float g = static_cast<const float*>(gradient.data())[i];
    static_cast<float*>(state.w.data())[i] -= step.lr * float((g > 0) - (g < 0));
  }
}
constexpr Optimizer kSign{"sign", update_sign};

TEST(NewOptimizer, UpdatesShardsLikeOneRank) {
  constexpr int64_t kCount = 53;
  const std::vector<Parameter> list{{"a", {1, kCount}, {0, 0, 1}, 0, kCount, true, 1, 0.5f},
                                    {"b", {1, kCount}, {0, 0, 1}, kCount, kCount}};
  WorldOptions options;
  options.ranks = 3;
  run_threads(options, [&](Communicator& comm) {
    std::vector<float> weights(2 * kCount, 1), gradients(weights.size());
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = float(int(i % 3) - 1);
    std::vector<ParameterGroup> groups{{comm, {0, 2 * kCount}, list}};
    ShardedOptimizer optimizer({}, flat(weights), flat(gradients), groups, 20,
                               {.optimizer = kSign});
    optimizer.ready({0, 2 * kCount});
    optimizer.reduce();
    optimizer.update(AdamStep::make({}, 0, 0.25, 0));
    optimizer.await_all();
    for (size_t i = 0; i < weights.size(); ++i) {
      const float lr = i < kCount ? 0.125f : 0.25f;
      EXPECT_EQ(weights[i], 1 - lr * float(int(i % 3) - 1)) << i;
    }
  });
}

TEST(Optimizers, AreTheChoicesOfTheKey) {
  for (const Optimizer& each : optimizers()) {
    OptimizerConfig config;
    config.name = each.name;
    EXPECT_EQ(config.uses_trust_ratios(), each.find_direction != nullptr) << each.name;
  }
  std::vector<std::string_view> names;
  for (const Optimizer& each : optimizers()) names.emplace_back(each.name);
  EXPECT_TRUE(std::ranges::equal(names, OptimizerConfig::keys().front().range.choices()));
}

}  // namespace
}  // namespace tandem::test
