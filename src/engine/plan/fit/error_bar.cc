#include "engine/plan/fit/error_bar.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "engine/plan/fit/calibration.h"

namespace tandem::plan {
namespace {

using Runs = std::vector<const RunRow*>;

std::set<std::string> groups_of(const Runs& runs) {
  std::set<std::string> groups;
  for (const RunRow* run : runs) groups.insert(run->group);
  return groups;
}

/// Runs that are most alike, of two groups, and what they have in common; no runs if there are
/// none.
std::pair<Runs, std::string> similar_runs(std::span<const RunRow> all, const RunRow& row) {
  const std::string family(gpu_of(row).family);
  const char* precision = is_fp8(row) ? "fp8" : "bf16";
  const char* kind = row.experts > 0 ? " MoE" : "";
  const auto is_family = [&](const RunRow& run) { return gpu_of(run).family == family; };
  const auto is_precision = [&](const RunRow& run) { return is_fp8(run) == is_fp8(row); };
  const auto is_kind = [&](const RunRow& run) { return (run.experts > 0) == (row.experts > 0); };
  using Matches = std::function<bool(const RunRow&)>;
  const std::array<std::pair<Matches, std::string>, 4> classes{{
      {[&](const RunRow& run) { return is_family(run) && is_precision(run) && is_kind(run); },
       fmt::format("{} {}{}", family, precision, kind)},
      {[&](const RunRow& run) { return is_family(run) && is_kind(run); }, family + kind},
      {[&](const RunRow& run) { return is_precision(run) && is_kind(run); },
       fmt::format("{}{} on all GPUs", precision, kind)},
      {[](const RunRow&) { return true; }, "all GPUs"},
  }};
  for (const auto& [matches, name] : classes) {
    Runs runs;
    for (const RunRow& run : all) {
      if (run.skipped.empty() && run.step_s && find_gpu(run.gpu) && matches(run)) {
        runs.push_back(&run);
      }
    }
    if (groups_of(runs).size() > 1) return {runs, name};
  }
  return {};
}

/// Errors of a group's runs, relative to the prediction.
void add_errors(std::span<const RunRow> all, const Runs& runs, const std::string& group,
                std::vector<double>& errors) {
  std::vector<RunRow> others, unknown;
  for (const RunRow& run : all) {
    if (run.group != group && find_gpu(run.gpu)) others.push_back(run);
  }
  for (const RunRow* run : runs) {
    if (run->group != group) continue;
    unknown.push_back(*run);
    unknown.back().is_of_new_software = true;
  }
  Runs predicted;
  for (const RunRow& run : unknown) predicted.push_back(&run);
  const Calibration calibration(others, predicted);
  for (const RunRow* run : predicted) {
    errors.push_back(std::abs(*run->step_s / calibration.predict(*run).total - 1));
  }
}

}  // namespace

double share_within(std::vector<double> errors) {
  constexpr size_t kOf = 5, kWithin = 4;
  const auto at = errors.begin() + ptrdiff_t((kWithin * errors.size() + kOf - 1) / kOf - 1);
  std::ranges::nth_element(errors, at);
  return *at;
}

std::optional<ErrorBar> error_bar(std::span<const RunRow> runs, const RunRow& row) {
  const auto [similar, name] = similar_runs(runs, row);
  if (similar.empty()) return std::nullopt;
  const std::set<std::string> groups = groups_of(similar);
  std::vector<double> errors;
  for (const std::string& group : groups) add_errors(runs, similar, group, errors);
  return ErrorBar{
      .share = share_within(errors), .runs = errors.size(), .groups = groups.size(), .of = name};
}

}  // namespace tandem::plan
