#include "engine/plan/cost/step_split.h"
#include "core/system/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

namespace tandem::plan {
namespace {

constexpr double kMinTerm = .002, kMinDifference = .02;  // shares of the step

nlohmann::ordered_json to_json(const StepSplit& split) {
  nlohmann::ordered_json json{{"step", split.step}};
  for (const SplitTerm& term : split_terms()) json[term.name] = split.*term.ms;
  return json;
}

}  // namespace

std::span<const SplitTerm> split_terms() {
  static constexpr std::array<SplitTerm, 11> kSplitTerms{{{"compute", &StepSplit::compute},
                                                          {"TP waits", &StepSplit::tp},
                                                          {"EP waits", &StepSplit::ep},
                                                          {"CP waits", &StepSplit::cp},
                                                          {"PP waits", &StepSplit::pp},
                                                          {"DP waits", &StepSplit::dp},
                                                          {"step waits", &StepSplit::step_waits},
                                                          {"sync waits", &StepSplit::sync},
                                                          {"update", &StepSplit::update},
                                                          {"data", &StepSplit::data},
                                                          {"other", &StepSplit::other}}};
  return kSplitTerms;
}

StepSplit split_of(const StepTime& time) {
  const double stages = time.exposed_pp + time.bubble;  // they wait for an uneven one, too
  return {.step = 1e3 * time.total,
          .compute = 1e3 * time.compute,
          .tp = 1e3 * time.exposed_tp,
          .ep = 1e3 * time.exposed_ep,
          .dp = 1e3 * time.exposed_dp,
          .cp = 1e3 * time.exposed_cp,
          .pp = 1e3 * (stages > 0 ? stages + time.imbalance : 0),
          .step_waits = 1e3 * (time.jitter + (stages > 0 ? 0 : time.imbalance)),
          .update = 1e3 * time.optimizer,
          .other = 1e3 * time.fixed};
}

StepSplit split_of(double step_ms, const PhaseTimes& phases) {
  const auto ms = [&](Phase phase) { return phases[size_t(phase)]; };
  StepSplit split{.step = step_ms,
                  .compute = ms(Phase::forward) + ms(Phase::backward) + ms(Phase::weight_gradients),
                  .tp = ms(Phase::tp_wait),
                  .ep = ms(Phase::ep_wait),
                  .dp = ms(Phase::dp_wait),
                  .cp = ms(Phase::cp_wait),
                  .pp = ms(Phase::pp_wait),
                  .step_waits = ms(Phase::step_wait),
                  .sync = ms(Phase::sync_wait),
                  .update = ms(Phase::update),
                  .data = ms(Phase::data)};
  split.other = step_ms;
  for (const SplitTerm& term : split_terms()) {
    if (term.ms != &StepSplit::other) split.other -= split.*term.ms;
  }
  return split;
}

std::vector<std::string> describe_split(int64_t first, int64_t last, const StepSplit& measured,
                                        const StepSplit& predicted) {
  const double longer = measured.step / predicted.step - 1;
  std::vector<std::string> lines{fmt::format(
      "self-check, steps {} to {}: {:.2f} ms a step, predicted {:.2f} ({:.1f} % {})", first, last,
      measured.step, predicted.step, 100 * std::abs(longer), longer < 0 ? "shorter" : "longer")};
  std::string terms;
  const SplitTerm* largest = nullptr;
  const auto difference = [&](const SplitTerm& term) {
    return measured.*term.ms - predicted.*term.ms;
  };
  for (const SplitTerm& term : split_terms()) {
    if (!largest || std::abs(difference(term)) > std::abs(difference(*largest))) largest = &term;
    if (std::max(measured.*term.ms, predicted.*term.ms) < kMinTerm * measured.step) continue;
    terms += fmt::format("{}{} {:.2f} ms, predicted {:.2f}", terms.empty() ? "  " : "; ", term.name,
                         measured.*term.ms, predicted.*term.ms);
  }
  lines.push_back(std::move(terms));
  if (std::abs(longer) >= kMinDifference) {
    lines.push_back(
        fmt::format("  they part most in {}: {:+.2f} ms", largest->name, difference(*largest)));
  }
  return lines;
}

std::string split_json(int64_t first, int64_t last, const StepSplit& measured,
                       const StepSplit& predicted) {
  const nlohmann::ordered_json json{{"first", first},
                                    {"last", last},
                                    {"predicted_ms", to_json(predicted)},
                                    {"measured_ms", to_json(measured)}};
  return dump_json(json, 1) + "\n";
}

}  // namespace tandem::plan
