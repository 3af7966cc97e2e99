#include "engine/train/checks/self_check.h"

#include <fmt/format.h>

#include <cstring>

#include "core/system/files.h"
#include "engine/plan/cost/measured_cost.h"
#include "engine/train/checks/cost_probe.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kWarmSteps = 2, kComparedSteps = 20;

void add_split(plan::StepSplit& sum, const plan::StepSplit& split, double share) {
  sum.step += share * split.step;
  for (const plan::SplitTerm& term : plan::split_terms()) sum.*term.ms += share * split.*term.ms;
}

}  // namespace

bool SelfCheck::applies(const TraceConfig& trace, const RunConfig& train,
                        const ParallelGroups& groups, int64_t begin) {
  const bool is_short = train.ends_by_steps() && train.steps - begin < kWarmSteps + kComparedSteps;
  return trace.ranks && !groups.on_gpus() && !is_short && train.batch_start == 0;
}

SelfCheck::SelfCheck(const plan::StepTime& predicted, const ParallelGroups& groups)
    : groups_(groups), predicted_(plan::split_of(predicted)) {}

bool SelfCheck::compares_next() const {
  return steps_ + 1 == kWarmSteps + kComparedSteps;
}

std::vector<std::string> SelfCheck::add(const StepRecord& step, const PhaseTimes& phases,
                                        const std::string& path) {
  if (++steps_ <= kWarmSteps || steps_ > kWarmSteps + kComparedSteps) return {};
  add_split(sum_, plan::split_of(step.step_ms, phases), 1.0 / kComparedSteps);
  if (steps_ < kWarmSteps + kComparedSteps) return {};
  Communicator& world = groups_.world();
  plan::StepSplit measured;
  for (const auto& blob : world.exchange(std::as_bytes(std::span(&sum_, 1)), "self-check")) {
    plan::StepSplit of_rank;
    std::memcpy(&of_rank, blob.data(), sizeof of_rank);
    add_split(measured, of_rank, 1.0 / world.size());
  }
  if (world.rank() > 0) return {};
  const int64_t first = step.step - kComparedSteps + 1;
  std::vector<std::string> lines = plan::describe_split(first, step.step, measured, predicted_);
  if (path.empty()) return lines;
  try {
    replace_file(path, plan::split_json(first, step.step, measured, predicted_));
  } catch (const IoError& error) {
    lines.push_back(fmt::format("warning: {}", error.what()));
  }
  return lines;
}

}  // namespace tandem
