#include "engine/check/layout_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <string_view>

#include "engine/model/codec_policy.h"
#include "engine/parallel/dims.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TensorDifference make_difference(const std::string& name, const GatheredTensor& found,
                                 const GatheredTensor& expected) {
  TensorDifference worst{name};
  if (found.shape != expected.shape) return {name, kNaN};
  double scale = 0, largest = 0;
  for (const float value : expected.max) scale = std::max(scale, std::abs(double(value)));
  for (size_t i = 0; i < expected.max.size(); ++i) {
    for (const float value : {found.min[i], found.max[i]}) {
      const double difference = std::abs(double(value) - double(expected.max[i]));
      if (difference <= largest) continue;
      worst = {name, 0, int64_t(i), value, expected.max[i]};
      if (std::isnan(difference)) return {name, kNaN, int64_t(i), value, expected.max[i]};
      largest = difference;
    }
  }
  // Infinite if zero was expected: the gradient of a value that nothing depends on.
  worst.relative = largest == 0 ? 0 : largest / scale;
  return worst;
}

TensorDifference make_difference(const std::string& name, double found, double expected) {
  const double difference = std::abs(found - expected);
  return {name, difference == 0 ? 0 : difference / std::abs(expected), 0, found, expected};
}

void sort_by_difference(std::vector<TensorDifference>& differences) {
  const auto key = [](const TensorDifference& d) {
    return std::isnan(d.relative) ? std::numeric_limits<double>::infinity() : d.relative;
  };
  std::ranges::stable_sort(differences, std::greater(), key);
}

constexpr std::array<std::string_view, 4> kAxes{"tp", "ep", "dp", "pp"};

int64_t size_of_axis(const TrainConfig& config, std::string_view axis) {
  const auto& parallel = config.parallel;
  if (axis == "tp") return parallel.tp;
  if (axis == "ep") return parallel.ep;
  return axis == "dp" ? parallel.dp : parallel.pp;
}

/// The same job without an axis, with the same microbatches.
TrainConfig without_axis(const TrainConfig& config, std::string_view axis) {
  TrainConfig other = config;
  auto& parallel = other.parallel;
  if (axis == "tp") parallel.tp = 1;
  if (axis == "ep" || axis == "dp") parallel.ep = 1;
  if (axis == "dp") {
    other.train.microbatch = microbatch_size(config) * config.parallel.dp;
    parallel.dp = 1;
  }
  if (axis == "pp") {
    parallel.pp = parallel.virtual_stages = 1;
    parallel.layers_per_stage.clear();
  }
  return other;
}

}  // namespace

std::vector<TensorDifference> compare_tensors(const GatheredTensors& found,
                                              const GatheredTensors& expected) {
  std::set<std::string> names;
  for (const auto* tensors : {&found, &expected}) {
    for (const auto& [name, tensor] : *tensors) names.insert(name);
  }
  std::vector<TensorDifference> differences;
  for (const std::string& name : names) {
    const auto of_found = found.find(name), of_expected = expected.find(name);
    if (of_found == found.end() || of_expected == expected.end()) {
      differences.push_back({name, kNaN});
    } else {
      differences.push_back(make_difference(name, of_found->second, of_expected->second));
    }
  }
  sort_by_difference(differences);
  return differences;
}

std::vector<TensorDifference> compare_gradients(const StepsOutcome& found,
                                                const StepsOutcome& expected) {
  std::vector<TensorDifference> differences = compare_tensors(found.gradients, expected.gradients);
  differences.push_back(make_difference("loss", found.loss, expected.loss));
  differences.push_back(make_difference("grad_norm", found.grad_norm, expected.grad_norm));
  sort_by_difference(differences);
  return differences;
}

double layout_bound(const TrainConfig& config) {
  if (config.train.dtype == "bf16") return 2e-2;
  const double tokens = double(config.train.batch) * double(config.train.seq);
  return 2e-6 * std::sqrt(std::max(1.0, tokens / 512));
}

TrainConfig one_rank_config(const TrainConfig& config) {
  TrainConfig one = config;
  for (const std::string_view axis : kAxes) one = without_axis(one, axis);
  return one;
}

const TensorDifference& LayoutCheck::of(const std::string& tensor) const {
  return *std::ranges::find(differences, tensor, &TensorDifference::tensor);
}

TrainConfig checked_config(TrainConfig config) {
  if (CodecPolicy::parse(config.parallel.codec) != CodecPolicy()) {
    throw InvalidArgument(fmt::format(
        "check-layout: parallel.codec is {}: expected none, as one rank sends no messages",
        config.parallel.codec));
  }
  if (config.train.dtype == "auto") config.train.dtype = "f32";
  if (config.parallel.strategy == "automatic") config.parallel.strategy = "serial";
  return config;
}

LayoutCheck check_layout(const TrainConfig& config, const Corpus& corpus, const StepHooks& hooks) {
  return check_layout(config, corpus, run_steps({one_rank_config(config), config}, corpus), hooks);
}

LayoutCheck check_layout(const TrainConfig& config, const Corpus& corpus,
                         const StepsOutcome& expected, const StepHooks& hooks) {
  const auto compare_layout = [&](const TrainConfig& layout) {
    return compare_gradients(run_steps({layout, config, 1, hooks}, corpus), expected);
  };
  LayoutCheck check{compare_layout(config), layout_bound(config), ""};
  for (const std::string_view axis : kAxes) {
    if (check.ok()) break;
    if (size_of_axis(config, axis) == 1) continue;
    if (compare_layout(without_axis(config, axis)).front().relative <= check.bound) {
      check.axis = axis;
      break;
    }
  }
  return check;
}

}  // namespace tandem
