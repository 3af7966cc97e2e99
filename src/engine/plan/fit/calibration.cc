#include "engine/plan/fit/calibration.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "core/median.h"
#include "core/system/printable.h"
#include "engine/plan/fit/normal_equations.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

/// Deviation of the logarithm of a measured step from the model's: noise between runs, and between
/// releases, which differ more in kernels and exchanges of experts.
constexpr double kNoise = .03, kMoeNoise = .1;
/// Rows that decide a class's factors; of fewer a wider class is fitted.
constexpr size_t kEnoughRows = 20;
constexpr double kDerivative = 1e-4;  ///< step of numeric derivatives
constexpr int kMaxIterations = 40, kMaxTrials = 10;
constexpr double kConverged = 1e-6;

struct Level {
  std::string key;
  double deviation;
};

/// Software that a row names, with the variants that its notes tell apart.
std::string software_of(const RunRow& row) {
  std::string software = row.software;
  for (const std::string_view variant : {"MaxText", "async TP", "vanilla TP"}) {
    if (row.notes.find(variant) != std::string::npos) software += fmt::format(" {}", variant);
  }
  if (row.precision.find_first_of("- ") != std::string::npos) software += " " + row.precision;
  return software;
}

/// Deviations that make up a term's factor for a row.
std::vector<Level> levels_of(size_t term, const RunRow& row, const GpuSpec& gpu) {
  const TermPrior& prior = term_priors()[term];
  const std::string name(prior.name);
  std::vector<Level> levels;
  const auto add = [&](double deviation, const std::string& key) {
    if (deviation > 0) levels.push_back({key, deviation});
  };
  add(prior.deviation, name);
  add(prior.by_gpu, fmt::format("{}@gpu:{}", name, gpu.name));
  add(prior.by_precision,
      fmt::format("{}@precision:{} {}", name, gpu.name, is_fp8(row) ? "fp8" : "bf16"));
  if (row.is_of_new_software) return levels;
  add(prior.by_group, fmt::format("{}@group:{}", name, row.group));
  add(prior.by_software, fmt::format("{}@software:{}", name, software_of(row)));
  return levels;
}

struct Sample {
  StepWork work;
  double log_step, noise;
  /// Indices of the deviations that each term sums.
  std::array<std::vector<size_t>, kTerms> levels;
};

struct Problem {
  std::vector<Sample> samples;
  std::vector<std::string> keys;
  std::vector<double> deviations;  ///< of the priors
};

Problem make_problem(std::span<const RunRow* const> rows) {
  Problem problem;
  std::map<std::string, size_t> indices;
  for (const RunRow* row : rows) {
    const GpuSpec gpu = gpu_of(*row);
    Sample sample{
        work_of(*row, gpu), std::log(*row->step_s), row->experts > 0 ? kMoeNoise : kNoise, {}};
    for (size_t term = 0; term < kTerms; ++term) {
      for (const Level& level : levels_of(term, *row, gpu)) {
        const auto [found, added] = indices.try_emplace(level.key, problem.keys.size());
        if (added) {
          problem.keys.push_back(level.key);
          problem.deviations.push_back(level.deviation);
        }
        sample.levels[term].push_back(found->second);
      }
    }
    problem.samples.push_back(std::move(sample));
  }
  return problem;
}

Factors factors_at(const Sample& sample, std::span<const double> x) {
  Factors factors;
  for (size_t term = 0; term < kTerms; ++term) {
    double log = 0;
    for (const size_t index : sample.levels[term]) log += x[index];
    factors[term] = term_priors()[term].mean * std::exp(log);
  }
  return factors;
}

std::vector<double> predictions(const Problem& problem, std::span<const double> x) {
  std::vector<double> logs;
  for (const Sample& sample : problem.samples)
    logs.push_back(std::log(step_time(sample.work, factors_at(sample, x)).total));
  return logs;
}

double cost_at(const Problem& problem, std::span<const double> x,
               std::span<const double> predicted) {
  double cost = 0;
  for (size_t i = 0; i < predicted.size(); ++i)
    cost += std::pow((predicted[i] - problem.samples[i].log_step) / problem.samples[i].noise, 2);
  for (size_t j = 0; j < x.size(); ++j) cost += std::pow(x[j] / problem.deviations[j], 2);
  return cost;
}

/// Derivatives of a sample's log step by the logarithm of each term's factor.
std::array<double, kTerms> term_derivatives(const Sample& sample, std::span<const double> x,
                                            double predicted) {
  std::array<double, kTerms> derivatives{};
  const Factors factors = factors_at(sample, x);
  for (size_t term = 0; term < kTerms; ++term) {
    if (sample.levels[term].empty()) continue;
    Factors moved = factors;
    moved[term] *= std::exp(kDerivative);
    derivatives[term] = (std::log(step_time(sample.work, moved).total) - predicted) / kDerivative;
  }
  return derivatives;
}

struct Equations {
  SymmetricMatrix data;  ///< J^T J / noise^2
  std::vector<double> gradient;
};

Equations make_equations(const Problem& problem, std::span<const double> x,
                         std::span<const double> predicted) {
  const size_t n = x.size();
  Equations equations{SymmetricMatrix(n), std::vector<double>(n)};
  std::vector<double> row(n);
  for (size_t i = 0; i < problem.samples.size(); ++i) {
    const Sample& sample = problem.samples[i];
    std::ranges::fill(row, 0);
    std::set<size_t> used;
    const auto derivatives = term_derivatives(sample, x, predicted[i]);
    for (size_t term = 0; term < kTerms; ++term) {
      for (const size_t index : sample.levels[term]) {
        row[index] += derivatives[term];
        used.insert(index);
      }
    }
    const double residual = sample.log_step - predicted[i], weight = std::pow(sample.noise, -2);
    for (const size_t a : used) {
      equations.gradient[a] += row[a] * residual * weight;
      for (const size_t b : used) equations.data.at(a, b) += row[a] * row[b] * weight;
    }
  }
  for (size_t j = 0; j < n; ++j) equations.gradient[j] -= x[j] / std::pow(problem.deviations[j], 2);
  return equations;
}

SymmetricMatrix damped(const Equations& equations, const Problem& problem, double damping) {
  SymmetricMatrix matrix = equations.data;
  for (size_t j = 0; j < matrix.n; ++j) {
    matrix.at(j, j) += 1 / std::pow(problem.deviations[j], 2);
    matrix.at(j, j) *= 1 + damping;
  }
  return matrix;
}

/// Trace of the hat matrix: how many parameters the rows, rather than the priors, decide.
double effective_parameters(const Equations& equations, const Problem& problem) {
  SymmetricMatrix factor = damped(equations, problem, 0);
  if (!factorize(factor)) return double(factor.n);
  double trace = 0;
  for (size_t j = 0; j < factor.n; ++j) {
    std::vector<double> column(factor.n);
    for (size_t i = 0; i < factor.n; ++i) column[i] = equations.data.at(i, j);
    trace += solve(factor, std::move(column))[j];
  }
  return trace;
}

/// One step downhill. False if none of the trials lowers the cost enough.
bool descend(const Problem& problem, const Equations& equations, std::vector<double>& x,
             std::vector<double>& predicted, double& cost, double& damping) {
  for (int trial = 0; trial < kMaxTrials; ++trial, damping *= 5) {
    SymmetricMatrix factor = damped(equations, problem, damping);
    if (!factorize(factor)) continue;
    const std::vector<double> step = solve(factor, equations.gradient);
    std::vector<double> moved = x;
    for (size_t j = 0; j < x.size(); ++j) moved[j] += step[j];
    std::vector<double> logs = predictions(problem, moved);
    const double lower = cost_at(problem, moved, logs);
    if (!(lower < cost)) continue;
    const bool worth_it = cost - lower > kConverged * cost;
    x = std::move(moved);
    predicted = std::move(logs);
    cost = lower;
    damping /= 5;
    return worth_it;
  }
  return false;
}

double median_flops_rate(std::span<const RunRow* const> rows) {
  std::vector<double> rates;
  for (const RunRow* row : rows)
    rates.push_back(flops_per_token(*row) * row->tokens() / row->gpus / *row->step_s);
  return upper_median(std::move(rates));
}

Fit make_fit(std::span<const RunRow* const> rows) {
  const Problem problem = make_problem(rows);
  std::vector<double> x(problem.keys.size()), predicted = predictions(problem, x);
  double cost = cost_at(problem, x, predicted), damping = 1e-3;
  Equations equations = make_equations(problem, x, predicted);
  for (int i = 0; i < kMaxIterations; ++i) {
    if (!descend(problem, equations, x, predicted, cost, damping)) break;
    equations = make_equations(problem, x, predicted);
  }
  Fit fit;
  fit.rows = rows.size();
  std::set<std::string> models;
  for (const RunRow* row : rows) models.insert(row->model);
  fit.models = models.size();
  fit.parameters = effective_parameters(equations, problem);
  fit.flops_rate = median_flops_rate(rows);
  for (size_t j = 0; j < x.size(); ++j) fit.deviations[problem.keys[j]] = x[j];
  return fit;
}

/// Classes of a row, from the narrowest to all rows.
std::array<std::string, 7> classes_of(const RunRow& row, const GpuSpec& gpu) {
  const std::string family = fmt::format("{}{}", gpu.family, row.experts > 0 ? " MoE" : ""),
                    rate = fmt::format("{} {}", gpu.family, is_fp8(row) ? "fp8" : "bf16"),
                    precision = rate + (row.experts > 0 ? " MoE" : "");
  return {row.group + " " + precision,
          row.group + " " + family,
          precision,
          family,
          rate,
          std::string(gpu.family),
          "all"};
}

using RowsByClass = std::map<std::string, std::vector<const RunRow*>>;

/// First of a row's classes that has rows; if these are few, the next that has enough among those
/// of its group, or for MoE among those of its GPUs, whose groups are small.
std::string class_to_fit(const std::array<std::string, 7>& names, bool has_experts,
                         const RowsByClass& classes) {
  const size_t last = has_experts ? 3 : 1;
  std::string chosen;
  for (size_t i = 0; i < names.size(); ++i) {
    const auto found = classes.find(names[i]);
    if (found == classes.end()) continue;
    if (!chosen.empty() && i > last) break;
    chosen = names[i];
    if (found->second.size() >= kEnoughRows) break;
  }
  return chosen;
}

std::set<std::string> distinct_classes(const RunRow& row) {
  const auto names = classes_of(row, gpu_of(row));
  return {names.begin(), names.end()};
}

}  // namespace

GpuSpec gpu_of(const RunRow& row) {
  const auto gpu = find_gpu(row.gpu);
  if (!gpu) {
    throw InvalidArgument(fmt::format("{}: gpu {}: expected one of {}", printable(row.id),
                                      printable(row.gpu), fmt::join(gpu_presets(), ", ")));
  }
  return *gpu;
}

Factors Fit::factors(const RunRow& row, const GpuSpec& gpu) const {
  Factors factors = prior_means();
  for (size_t term = 0; term < kTerms; ++term) {
    double log = 0;
    for (const Level& level : levels_of(term, row, gpu)) {
      const auto found = deviations.find(level.key);
      if (found != deviations.end()) log += found->second;
    }
    factors[term] *= std::exp(log);
  }
  return factors;
}

Calibration::Calibration(std::span<const RunRow> rows, std::span<const RunRow* const> predicted) {
  RowsByClass classes;
  for (const RunRow& row : rows) {
    if (!row.skipped.empty() || !row.step_s) continue;
    for (const std::string& name : distinct_classes(row)) classes[name].push_back(&row);
  }
  if (classes.empty())
    throw InvalidArgument("no row to fit: expected one with a model, a layout and a step time");
  for (const RunRow* row : predicted) {
    if (!row->skipped.empty()) continue;
    const auto names = classes_of(*row, gpu_of(*row));
    const std::string& narrowest = *std::ranges::find_if(
        names, [&](const std::string& name) { return classes.contains(name); });
    const std::string chosen = class_to_fit(names, row->experts > 0, classes);
    classes_[names.front()] = {chosen, median_flops_rate(classes[narrowest])};
    if (!fits_.contains(chosen)) fits_[chosen] = make_fit(classes[chosen]);
  }
}

const Calibration::RowClass& Calibration::class_of(const RunRow& row) const {
  const auto found = classes_.find(classes_of(row, gpu_of(row)).front());
  return found == classes_.end() ? classes_.begin()->second : found->second;
}

const Fit& Calibration::fit_of(const RunRow& row) const {
  return fits_.at(class_of(row).fitted);
}

StepTime Calibration::predict(const RunRow& row) const {
  const GpuSpec gpu = gpu_of(row);
  return step_time(work_of(row, gpu), fit_of(row).factors(row, gpu));
}

double Calibration::constant_flops_step(const RunRow& row) const {
  return flops_per_token(row) * row.tokens() / row.gpus / class_of(row).flops_rate;
}

}  // namespace tandem::plan
