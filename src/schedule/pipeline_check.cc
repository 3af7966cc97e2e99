#include "schedule/pipeline_check.h"

#include <fmt/format.h>

#include <array>
#include <string_view>

#include "schedule/pipeline_simulation.h"

namespace tandem::schedule {
namespace {

constexpr std::array<std::string_view, 4> kPassNames{"forward", "backward", "backward_input",
                                                     "backward_weight"};

std::string describe(int rank, const PipelineAction& action) {
  return fmt::format("rank {}: {} of chunk {}, microbatch {}", rank,
                     kPassNames[size_t(action.pass)], action.chunk, action.microbatch);
}

/// Number of passes of each kind of one chunk and microbatch.
using PassCounts = std::array<int, kPassNames.size()>;

std::string find_wrong_count(const PipelineShape& shape, int rank,
                             const std::vector<PipelineAction>& actions) {
  std::vector<PassCounts> counts(size_t(shape.chunks) * size_t(shape.microbatches));
  for (const PipelineAction& action : actions) {
    if (action.chunk < 0 || action.chunk >= shape.chunks || action.microbatch < 0 ||
        action.microbatch >= shape.microbatches) {
      return fmt::format("{}: expected chunks below {} and microbatches below {}",
                         describe(rank, action), shape.chunks, shape.microbatches);
    }
    ++counts[size_t(action.chunk * shape.microbatches + action.microbatch)][size_t(action.pass)];
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == PassCounts{1, 1, 0, 0} || counts[i] == PassCounts{1, 0, 1, 1}) continue;
    const int microbatch = int(i) % shape.microbatches, chunk = int(i) / shape.microbatches;
    return fmt::format(
        "rank {}: chunk {}, microbatch {} has {} forward, {} backward, {} backward_input and {} "
        "backward_weight passes: expected one of each, backward either whole or split",
        rank, chunk, microbatch, counts[i][0], counts[i][1], counts[i][2], counts[i][3]);
  }
  return "";
}

}  // namespace

std::string find_violation(const PipelineShape& shape,
                           const std::vector<std::vector<PipelineAction>>& actions) {
  if (int(actions.size()) != shape.ranks) {
    return fmt::format("lists of {} ranks: expected {}", actions.size(), shape.ranks);
  }
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const std::string wrong = find_wrong_count(shape, rank, actions[size_t(rank)]);
    if (!wrong.empty()) return wrong;
  }
  const PipelineTimes times = simulate(shape, actions);
  for (size_t rank = 0; rank < actions.size(); ++rank) {
    const size_t done = times.passes[rank].size();
    if (done < actions[rank].size()) {
      return describe(int(rank), actions[rank][done]) + " waits forever";
    }
  }
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const int peak = times.peak_activations[size_t(rank)], formula = peak_activations(shape, rank);
    if (peak != formula) {
      return fmt::format("rank {} stores {} activations: expected {}", rank, peak, formula);
    }
  }
  return "";
}

}  // namespace tandem::schedule
