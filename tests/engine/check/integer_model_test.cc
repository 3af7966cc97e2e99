// Without rounding every layout has the bits of one rank, which are those of exact arithmetic.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/check/layout_steps.h"
#include "exact_step.h"
#include "generated_layouts.h"
#include "integer_weights.h"

namespace tandem {
namespace {

constexpr uint64_t kSeed = 6;
constexpr size_t kShort = 25, kShortContext = 8;
constexpr double kMantissaBits = 24;

/// `factor`: of all weights.
StepsOutcome run_integers(const TrainConfig& config, float factor = 1) {
  StepHooks hooks;
  hooks.initialize = [&](Stage& stage) {
    initialize_integers(config.model, stage);
    for (float& weight :
         std::span(stage.parameters().as<float>(), size_t(stage.parameters().elements()))) {
      weight *= factor;
    }
  };
  return run_steps({config, config, 1, hooks}, tiny_corpus());
}

TrainConfig with_sizes(int64_t tp, int64_t dp, int64_t pp) {
  TrainConfig config = integer_config(tiny_config(false));
  config.parallel.tp = tp;
  config.parallel.dp = dp;
  config.parallel.pp = pp;
  return config;
}

/// All generated layouts, each once: windows are always the integer model's.
std::vector<TrainConfig> integer_layouts() {
  std::vector<TrainConfig> all;
  for (const TrainConfig& config : generate_layouts(kSeed)) {
    if (config.model.sliding_window == 0) all.push_back(integer_config(config));
  }
  return all;
}

/// Generated layouts of context-parallel ranks on whole windows.
std::vector<TrainConfig> integer_context_layouts() {
  std::vector<TrainConfig> all;
  for (TrainConfig config : generate_context_layouts(kSeed)) {
    if (config.model.sliding_window > 0 || config.data.document_mask) continue;
    config.train.seq = config.model.max_seq;
    all.push_back(integer_config(config));
  }
  return all;
}

/// Exact steps, which layouts with the same microbatches share.
class ExactSteps {
 public:
  const ExactStep& of(const TrainConfig& config) {
    const bool has_aux_loss = config.model.experts > 0 && config.train.aux_loss_scope != "step";
    const std::string key =
        fmt::format("{} {} {} {} {}", config.model.experts, config.model.tie_word_embeddings,
                    config.model.parallel_block, has_aux_loss ? config.train.microbatch : 0,
                    has_aux_loss ? config.parallel.dp : 0);
    const auto found = steps_.find(key);
    if (found != steps_.end()) return found->second;
    const ExactStep& step = steps_[key] = compute_exact_step(config, tiny_corpus());
    EXPECT_LE(step.bits, kMantissaBits) << step.widest;
    for (const auto& [name, values] : step.gradients) {
      const bool is_zero = std::ranges::all_of(values, [](double value) { return value == 0; });
      const bool is_query_or_key =
          name.find("q_proj") != name.npos || name.find("k_proj") != name.npos;
      EXPECT_EQ(is_zero, is_query_or_key) << name;
    }
    if (step.bits > bits_) bits_ = step.bits, widest_ = step.widest;
    return step;
  }
  std::string describe() const { return fmt::format("{:.1f} bits in sums of {}", bits_, widest_); }

 private:
  std::map<std::string, ExactStep> steps_;
  double bits_ = 0;
  std::string widest_;
};

/// Elements that differ from the exact ones in any bit.
int64_t count_differences(const GatheredTensors& found, const ExactStep& expected) {
  EXPECT_EQ(found.size(), expected.gradients.size());
  int64_t differences = 0;
  for (const auto& [name, tensor] : found) {
    const auto exact = expected.gradients.find(name);
    if (exact == expected.gradients.end() || exact->second.size() != tensor.min.size()) {
      ADD_FAILURE() << name;
      continue;
    }
    for (size_t i = 0; i < tensor.min.size(); ++i) {
      const double value = exact->second[i];
      if (double(tensor.min[i]) == value && double(tensor.max[i]) == value) continue;
      ++differences;
    }
  }
  return differences;
}

void expect_exact(std::span<const TrainConfig> layouts) {
  ExactSteps exact;
  for (const TrainConfig& config : layouts) {
    SCOPED_TRACE(describe_layout(config));
    const ExactStep& expected = exact.of(config);
    const StepsOutcome found = run_integers(config);
    EXPECT_EQ(count_differences(found.gradients, expected), 0);
    // Logarithms are not integers.
    EXPECT_NEAR(found.loss, expected.loss, 1e-13 * expected.loss);
  }
  fmt::print("{} layouts, {}\n", layouts.size(), exact.describe());
}

TEST(IntegerModel, EveryLayoutComputesTheExactGradients) {
  const std::vector<TrainConfig> layouts = integer_layouts();
  ASSERT_EQ(layouts.size(), 1048u);
  expect_exact(std::span(layouts).first(kShort));
}

TEST(IntegerModel, ContextParallelLayoutsComputeTheExactGradients) {
  const std::vector<TrainConfig> layouts = integer_context_layouts();
  expect_exact(std::span(layouts).first(kShortContext));
}

// The comparison finds rounding: with weights of 24 bits each layout has its own last bits.
TEST(IntegerModel, LayoutsDifferWithRounding) {
  const auto gradient_bits = [](const TrainConfig& config) {
    std::vector<float> all;
    for (const auto& [name, tensor] : run_integers(config, 1.2345678f).gradients) {
      all.insert(all.end(), tensor.max.begin(), tensor.max.end());
    }
    return all;
  };
  const std::vector<float> one_rank = gradient_bits(with_sizes(1, 1, 1));
  EXPECT_NE(gradient_bits(with_sizes(2, 1, 1)), one_rank);
  EXPECT_NE(gradient_bits(with_sizes(1, 2, 1)), one_rank);
}

TEST(IntegerModelLong, EveryLayoutComputesTheExactGradients) {
  expect_exact(integer_layouts());
}
TEST(IntegerModelLong, ContextParallelLayoutsComputeTheExactGradients) {
  expect_exact(integer_context_layouts());
}

}  // namespace
}  // namespace tandem
