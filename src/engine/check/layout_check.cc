#include "engine/check/layout_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string_view>

#include "engine/model/codec_policy.h"
#include "engine/model/parameter_patterns.h"
#include "engine/parallel/dims.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double max_magnitude(const GatheredTensor& tensor) {
  double scale = 0;
  for (const float value : tensor.max) scale = std::max(scale, std::abs(double(value)));
  return scale;
}

/// Share of the largest gradient below which a tensor's values are rounding errors in place of 0,
/// as are those of queries and keys of attention to one key.
constexpr double kRounding = 1e-7;

/// 0 / 0 is no difference; infinite if zero was expected: the gradient of a value that nothing
/// depends on.
double divide(double difference, double scale) {
  return difference == 0 ? 0 : difference / scale;
}

/// Fills ratio, remainder and copies.
void compare_shape(const GatheredTensor& found, const GatheredTensor& expected,
                   TensorDifference& difference) {
  const double scale = max_magnitude(expected);
  double products = 0, squares = 0, remainder = 0, copies = 0;
  for (size_t i = 0; i < expected.max.size(); ++i) {
    products += double(found.max[i]) / scale * double(expected.max[i]) / scale;
    squares += double(expected.max[i]) / scale * double(expected.max[i]) / scale;
  }
  difference.ratio = products / squares;
  for (size_t i = 0; i < expected.max.size(); ++i) {
    const double multiple = difference.ratio * double(expected.max[i]);
    for (const float value : {found.min[i], found.max[i]}) {
      remainder = std::max(remainder, std::abs(double(value) - multiple));
    }
    copies = std::max(copies, double(found.max[i]) - double(found.min[i]));
  }
  difference.remainder = divide(remainder, std::abs(difference.ratio) * scale);
  difference.copies = divide(copies, scale);
}

TensorDifference make_difference(const std::string& name, const GatheredTensor& found,
                                 const GatheredTensor& expected, Compared kind,
                                 double largest_of_all) {
  TensorDifference worst{.tensor = name, .kind = kind};
  worst.relative = kNaN;
  if (found.shape != expected.shape) return worst;
  double largest = 0;
  for (size_t i = 0; i < expected.max.size(); ++i) {
    for (const float value : {found.min[i], found.max[i]}) {
      const double difference = std::abs(double(value) - double(expected.max[i]));
      if (difference <= largest) continue;
      worst.element = int64_t(i);
      worst.found = value;
      worst.expected = expected.max[i];
      if (std::isnan(difference)) return worst;
      largest = difference;
    }
  }
  const double scale = max_magnitude(expected);
  const bool is_rounding = scale > 0 && scale <= kRounding * largest_of_all;
  worst.relative = divide(largest, is_rounding ? largest_of_all : scale);
  if (largest > 0) compare_shape(found, expected, worst);
  return worst;
}

TensorDifference make_difference(const std::string& name, double found, double expected) {
  TensorDifference difference{.tensor = name, .found = found, .expected = expected};
  difference.relative = divide(std::abs(found - expected), std::abs(expected));
  difference.kind = Compared::number;
  difference.ratio = found / expected;
  return difference;
}

void sort_by_difference(std::vector<TensorDifference>& differences) {
  const auto key = [](const TensorDifference& d) {
    return std::isnan(d.relative) ? std::numeric_limits<double>::infinity() : d.relative;
  };
  std::ranges::stable_sort(differences, std::greater(), key);
}

constexpr std::string_view kRecompute = "recompute";
constexpr std::array<std::string_view, 6> kAxes{"tp", "cp", "ep", "dp", "pp", kRecompute};
constexpr std::string_view kMicrobatches = "microbatches";

int64_t size_of_axis(const ParallelConfig& parallel, const RunConfig& train,
                     std::string_view axis) {
  if (axis == "tp") return parallel.tp;
  if (axis == "cp") return parallel.cp;
  if (axis == "ep") return parallel.ep;
  if (axis == kRecompute) return train.recompute == "none" ? 1 : 2;
  return axis == "dp" ? parallel.learner_dp() : parallel.pp;
}

/// Makes it the same job without an axis or recomputation, with the same microbatches.
void remove_axis(TrainConfig& config, std::string_view axis) {
  auto& parallel = config.parallel;
  if (axis == "tp") parallel.tp = 1;
  if (axis == "cp") parallel.cp = 1;
  if (axis == "ep" || axis == "dp") parallel.ep = 1;
  if (axis == "dp") {
    const int64_t learners = parallel.sync.num_learners();
    config.train.microbatch = microbatch_size(config.parallel, config.train) *
                              config.parallel.logical_replicas() / learners;
    parallel.dp = learners;
    parallel.replicas = 0;
  }
  if (axis == kRecompute) {
    config.train.recompute = "none";
    config.train.recompute_layers = 0;
  }
  if (axis == "pp") {
    parallel.pp = parallel.virtual_stages = 1;
    parallel.layers_per_stage.clear();
  }
}

/// Factor of the whole tensor, or another property of the difference, in parentheses.
std::string describe_property(const TensorDifference& d, double bound) {
  if (std::isnan(d.found)) return " (NaN)";
  if (!std::isfinite(d.relative)) return "";
  if (d.copies > bound) return " (copies differ)";
  const std::string factor = fmt::format("{:.4g}", d.ratio);
  return d.remainder <= bound && factor != "1" ? fmt::format(" ({} x)", factor) : "";
}

/// Lines on the differences of one kind. `noun`: for a single one; `plural`: of all.
std::vector<std::string> describe_kind(const LayoutCheck& check, Compared kind,
                                       std::string_view noun, std::string_view plural) {
  std::map<std::string, size_t> sizes;  // of patterns
  std::map<std::string, std::string> differing;
  size_t num_tensors = 0;
  for (const TensorDifference& d : check.differences) {
    if (d.kind != kind) continue;
    ++num_tensors;
    for (const bool all_numbers : {false, true}) ++sizes[to_pattern(d.tensor, all_numbers)];
    if (!(d.relative <= check.bound)) {
      differing[d.tensor] = describe_property(d, check.bound);
    }
  }
  // Tensors that differ in the same way, by pattern; `sizes` counts names without a number twice.
  std::map<std::string, std::map<std::string, size_t>> counts;
  std::set<std::string> properties;
  for (const auto& [name, property] : differing) {
    properties.insert(property);
    for (const bool all_numbers : {false, true}) ++counts[to_pattern(name, all_numbers)][property];
  }
  if (num_tensors > 1 && differing.size() == num_tensors) {
    return {fmt::format("all {}{}", plural, properties.size() == 1 ? *properties.begin() : "")};
  }
  std::set<std::string> texts;
  for (const auto& [name, property] : differing) {
    std::string shown = name;
    for (const bool all_numbers : {false, true}) {
      const std::string pattern = to_pattern(name, all_numbers);
      const size_t size = sizes[pattern];
      if (size > 1 && counts[pattern][property] == size) shown = pattern;
    }
    texts.insert(fmt::format("{}{}{}", noun, shown, property));
  }
  return {texts.begin(), texts.end()};
}

}  // namespace

std::vector<TensorDifference> compare_tensors(const GatheredTensors& found,
                                              const GatheredTensors& expected, Compared kind) {
  std::set<std::string> names;
  for (const auto* tensors : {&found, &expected}) {
    for (const auto& [name, tensor] : *tensors) names.insert(name);
  }
  double largest = 0;
  for (const auto& [name, tensor] : expected) largest = std::max(largest, max_magnitude(tensor));
  std::vector<TensorDifference> differences;
  for (const std::string& name : names) {
    const auto of_found = found.find(name), of_expected = expected.find(name);
    if (of_found == found.end() || of_expected == expected.end()) {
      differences.push_back({.tensor = name, .relative = kNaN, .kind = kind});
    } else {
      differences.push_back(
          make_difference(name, of_found->second, of_expected->second, kind, largest));
    }
  }
  sort_by_difference(differences);
  return differences;
}

std::vector<TensorDifference> compare_steps(const StepsOutcome& found,
                                            const StepsOutcome& expected) {
  std::vector<TensorDifference> differences = compare_tensors(found.gradients, expected.gradients);
  for (auto& weight : compare_tensors(found.initial, expected.initial, Compared::weight)) {
    differences.push_back(std::move(weight));
  }
  differences.push_back(make_difference("loss", found.loss, expected.loss));
  if (found.aux_loss != 0 || expected.aux_loss != 0) {
    differences.push_back(make_difference("aux_loss", found.aux_loss, expected.aux_loss));
  }
  differences.push_back(make_difference("grad_norm", found.grad_norm, expected.grad_norm));
  sort_by_difference(differences);
  return differences;
}

double layout_bound(const RunConfig& train) {
  if (train.dtype == "bf16") return 2e-2;
  if (train.is_fp8()) return 0.3;  // each rank's shard of a row has a scale of its own
  const double tokens = double(train.batch) * double(train.seq);
  return 2e-6 * std::sqrt(std::max(1.0, tokens / 512));
}

TrainConfig one_rank_config(const TrainConfig& config) {
  TrainConfig one = config;
  for (const std::string_view axis : kAxes) remove_axis(one, axis);
  return one;
}

const TensorDifference& LayoutCheck::of(const std::string& number) const {
  return *std::ranges::find_if(differences, [&](const TensorDifference& d) {
    return d.kind == Compared::number && d.tensor == number;
  });
}

size_t LayoutCheck::num_tensors() const {
  return size_t(std::ranges::count(differences, Compared::gradient, &TensorDifference::kind));
}

std::string describe_differences(const LayoutCheck& check) {
  std::vector<std::string> texts;
  const auto add = [&](Compared kind, std::string_view singular, std::string_view plural) {
    for (auto& text : describe_kind(check, kind, singular, plural))
      texts.push_back(std::move(text));
  };
  add(Compared::weight, "weight ", "weights");
  add(Compared::number, "", "numbers");
  add(Compared::gradient, "gradient of ", "gradients");
  return fmt::format("{}", fmt::join(texts, ", "));
}

TrainConfig checked_config(TrainConfig config) {
  if (CodecPolicy::parse(config.parallel.codec) != CodecPolicy()) {
    throw InvalidArgument(fmt::format(
        "check-layout: parallel.codec is {}: expected none, as one rank sends no messages",
        config.parallel.codec));
  }
  // The first step of a ramp-up stands for it.
  config.train.batch = config.train.batch_at(0);
  config.train.batch_start = config.train.batch_increment = config.train.batch_rampup_samples = 0;
  if (config.train.dtype == "auto") config.train.dtype = "f32";
  if (config.parallel.strategy == "automatic") config.parallel.strategy = "serial";
  return config;
}

StepsOutcome run_one_rank(const TrainConfig& config, const TokenSource& source) {
  return run_steps({one_rank_config(config), config}, source);
}

LayoutCheck check_layout(const TrainConfig& config, const TokenSource& source,
                         const StepsOutcome& expected, const StepHooks& hooks) {
  const auto compare = [&](const LayoutRun& run, const StepsOutcome& of_one) {
    return compare_steps(run_steps(run, source), of_one);
  };
  LayoutCheck check{compare({config, config, 1, hooks}, expected), layout_bound(config.train), ""};
  if (check.ok()) return check;
  for (const std::string_view axis : kAxes) {
    if (size_of_axis(config.parallel, config.train, axis) == 1) continue;
    TrainConfig layout = config;
    remove_axis(layout, axis);
    if (!layout.is_valid()) continue;
    if (compare({layout, config, 1, hooks}, expected).front().relative <= check.bound) {
      check.axis = axis;
      return check;
    }
  }
  TrainConfig one = config;  // without gradient accumulation
  one.train.microbatch = config.train.batch / config.parallel.logical_replicas();
  if (one.train.microbatch == microbatch_size(config.parallel, config.train) || !one.is_valid())
    return check;
  const auto differences = compare({one, one, 1, hooks}, run_one_rank(one, source));
  if (differences.front().relative <= check.bound) check.axis = kMicrobatches;
  return check;
}

}  // namespace tandem
