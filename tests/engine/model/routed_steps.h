// Steps of a model with experts, and the check that their error is that of other ranks' roundings.
//
// Rounding may change the experts of a row whose scores are close, which makes its result and those
// of later rows of its sequence jump. Earlier rows do not depend on it: the check takes the loss of
// those only. A changed choice must be one of scores no farther apart than rounding moves them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/exec.h"
#include "engine/model/expert_load.h"
#include "tandem/collectives.h"
#include "tests/engine/model/harness.h"

namespace tandem::test {

/// Scores of all experts for a row, and the chosen ones, sorted.
struct RowRouting {
  std::vector<float> scores;
  std::vector<int32_t> experts;

  bool has(int32_t expert) const { return std::ranges::binary_search(experts, expert); }
};

struct RoutedStep {
  Step step;
  std::map<std::pair<int, int64_t>, RowRouting> rows;  ///< by layer and row
};

inline RoutedStep run_routed(const RunRanks& run, const ModelConfig& config,
                             TransformerOptions options, const std::vector<int32_t>& targets = {}) {
  RoutedStep result;
  std::mutex mutex;
  static thread_local Communicator* rank = nullptr;
  options.routed = [&](int layer, const Tensor& scores, const Tensor& chosen) {
    const int64_t rows = chosen.dim(0), top_k = chosen.dim(1), experts = scores.dim(1);
    std::vector<int32_t> all_chosen(size_t(rows * top_k));
    std::vector<float> all_scores(size_t(rows * experts));
    copy(make_exec(*rank), chosen, Tensor::of(std::span(all_chosen), {rows, top_k}));
    copy(make_exec(*rank), scores, Tensor::of(std::span(all_scores), {rows, experts}));
    const int64_t first = shard_of(options.batch * options.seq, rank->size(), rank->rank()).begin;
    const std::lock_guard lock(mutex);
    for (int64_t row = 0; row < rows; ++row) {
      RowRouting& routing = result.rows[{layer, first + row}];
      const auto chosen_begin = all_chosen.begin() + row * top_k;
      const auto scores_begin = all_scores.begin() + row * experts;
      routing.experts.assign(chosen_begin, chosen_begin + top_k);
      routing.scores.assign(scores_begin, scores_begin + experts);
      std::ranges::sort(routing.experts);
    }
  };
  const RunRanks run_known = [&](const auto& body) {
    run([&](Communicator& comm) {
      rank = &comm;
      body(comm);
    });
  };
  result.step = run_on(run_known, config, options, {}, targets);
  return result;
}

/// Difference of the smallest chosen score and the largest other one; below 0 if a larger one is
/// not chosen.
inline double margin(const RowRouting& scored, const RowRouting& chosen) {
  double smallest = std::numeric_limits<double>::infinity(), largest = -smallest;
  for (size_t e = 0; e < scored.scores.size(); ++e) {
    double& end = chosen.has(int32_t(e)) ? smallest : largest;
    const auto score = double(scored.scores[e]);
    end = chosen.has(int32_t(e)) ? std::min(end, score) : std::max(end, score);
  }
  return smallest - largest;
}

/// Positions of each sequence before the first one whose experts differ in some layer.
using EqualRows = std::vector<int64_t>;
inline EqualRows equal_rows(const RoutedStep& a, const RoutedStep& exact,
                            const TransformerOptions& options) {
  EqualRows rows(size_t(options.batch), options.seq);
  for (const auto& [key, routing] : a.rows) {
    if (routing.experts == exact.rows.at(key).experts) continue;
    int64_t& end = rows[size_t(key.second / options.seq)];
    end = std::min(end, key.second % options.seq);
  }
  return rows;
}

/// Root of the mean squared error of the scores of equal rows.
inline double score_error(const RoutedStep& a, const RoutedStep& exact, const EqualRows& equal,
                          const TransformerOptions& options) {
  double squares = 0, count = 0;
  for (const auto& [key, routing] : a.rows) {
    if (key.second % options.seq >= equal[size_t(key.second / options.seq)]) continue;
    const RowRouting& right = exact.rows.at(key);
    for (size_t e = 0; e < right.scores.size(); ++e, ++count) {
      squares += std::pow(double(routing.scores[e]) - double(right.scores[e]), 2);
    }
  }
  return std::sqrt(squares / count);
}

/// Expects the largest scores to be chosen, and others than in the exact step only where those are
/// within `max_margin`: in the first row of a sequence, and its first layer, that differs.
inline void expect_close_choices(const RoutedStep& found, const RoutedStep& exact,
                                 const EqualRows& equal, const TransformerOptions& options,
                                 double max_margin) {
  std::vector<bool> seen(equal.size());
  for (const auto& [key, routing] : found.rows) {  // in the order of layers
    EXPECT_GE(margin(routing, routing), 0) << "layer " << key.first << " row " << key.second;
    const RowRouting& right = exact.rows.at(key);
    const auto sequence = size_t(key.second / options.seq);
    if (key.second % options.seq != equal[sequence] || seen[sequence]) continue;
    if (routing.experts == right.experts) continue;
    seen[sequence] = true;
    EXPECT_LE(-margin(right, routing), max_margin)
        << "layer " << key.first << " row " << key.second << " has other experts";
  }
}

/// Ranks to compare with one rank in f32.
struct ComparedRanks {
  RunRanks one, cpu, tested;
};

/// Targets of the rows whose experts are the same in all steps. Expects other experts to be chosen
/// where scores are close only.
inline std::vector<int32_t> targets_of_equal_rows(const ModelConfig& config,
                                                  const ComparedRanks& ranks,
                                                  const TransformerOptions& f32,
                                                  const TransformerOptions& bf16) {
  const RoutedStep exact = run_routed(ranks.one, config, f32),
                   on_cpus = run_routed(ranks.cpu, config, bf16),
                   found = run_routed(ranks.tested, config, bf16);
  EXPECT_EQ(found.rows.size(), exact.rows.size());
  const EqualRows of_cpus = equal_rows(on_cpus, exact, f32),
                  of_found = equal_rows(found, exact, f32);
  const double error = score_error(on_cpus, exact, of_cpus, f32);
  EXPECT_LE(score_error(found, exact, of_found, f32), 1.5 * error);
  // The largest of some thousand errors is far above their mean.
  expect_close_choices(found, exact, of_found, f32, 20 * error);
  std::vector<int32_t> targets = make_batch(config, f32.batch * f32.seq).targets;
  for (size_t i = 0; i < of_found.size(); ++i) {
    const auto begin = targets.begin() + int64_t(i) * f32.seq;
    std::fill(begin + std::min(of_cpus[i], of_found[i]), begin + f32.seq, -1);
  }
  return targets;
}

/// Expects the error of a step of the tested ranks in bf16 to be that of the CPU ranks. The
/// auxiliary loss has a gradient of all rows: where experts differ, it may be another one of the
/// same size, so that gradients are compared without it, too.
inline void expect_error_of_cpu_ranks(ModelConfig config, const ComparedRanks& ranks) {
  const TransformerOptions f32{.batch = 16, .seq = 12};
  TransformerOptions bf16 = f32;
  bf16.dtype = DType::bf16;
  const std::vector<int32_t> all = make_batch(config, f32.batch * f32.seq).targets,
                             targets = targets_of_equal_rows(config, ranks, f32, bf16);
  double equal = 0, other = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] >= 0) (targets[i] >= 0 ? equal : other) += 1;
  }
  EXPECT_GT(equal, other) << "targets of rows with the same experts, and others";
  const auto step = [&](const RunRanks& run, const TransformerOptions& options) {
    return run_on(run, config, options, {}, targets);
  };
  const double aux_loss_coeff = std::exchange(config.aux_loss_coeff, 0);
  const Step without_aux = step(ranks.one, f32);
  for (const bool has_aux : {false, true}) {
    if (has_aux) config.aux_loss_coeff = aux_loss_coeff;
    const Step exact = has_aux ? step(ranks.one, f32) : without_aux,
               on_cpus = step(ranks.cpu, bf16), found = step(ranks.tested, bf16);
    EXPECT_LE(std::abs(found.loss - exact.loss),
              2 * std::abs(on_cpus.loss - exact.loss) + 2e-4 * exact.loss);
    for (const auto& [name, values] : exact.gradients) {
      if (name.ends_with("correction_bias")) continue;  // no gradient
      const auto error_of = [&, &name = name, &values = values](const Step& a) {
        return difference({{name, a.gradients.at(name)}}, {{name, values}});
      };
      const double of_cpus = error_of(on_cpus),
                   of_aux = 2 * std::sqrt(other / (equal + other)) * error_of(without_aux);
      EXPECT_LE(error_of(found), 1.5 * of_cpus + 0x1p-8 + of_aux)
          << name << ", CPU ranks " << of_cpus << ", " << other << " targets left out";
    }
  }
}

}  // namespace tandem::test
