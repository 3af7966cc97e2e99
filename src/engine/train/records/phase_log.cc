#include "engine/train/records/phase_log.h"

#include <fmt/format.h>

#include <utility>

#include "comm/workspace.h"
#include "core/system/log.h"
#include "core/system/machine.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void warn_of_records(const IoError& error) {
  log_message(LogLevel::warn, fmt::format("{}: no further records of this rank", error.what()));
}

}  // namespace

PhaseLog::PhaseLog(const TraceConfig& trace, const std::string& folder,
                   const ParallelGroups& groups, int64_t begin)
    : groups_(groups) {
  if (!trace.ranks) return;
  const ParallelDims& dims = groups.dims();
  const int rank = groups.world().rank();
  const RankPosition position{rank,
                              dims.ranks(),
                              dims.index(kTp, rank),
                              dims.learner(rank) * dims.dp() + dims.index(kDp, rank),
                              dims.index(kPp, rank),
                              groups.on_gpus(),
                              host_name(),
                              dims.cp() > 1 ? std::optional(dims.index(kCp, rank)) : std::nullopt};
  try {
    records_.emplace(folder, position, begin);
  } catch (const IoError& error) {
    warn_of_records(error);
  }
}

void PhaseLog::count_layer_bytes(StepRecord& step) {
  const auto count = [](const Communicator* ranks, uint64_t& before) {
    const Workspace* workspace = ranks ? ranks->workspace_if_any() : nullptr;
    return workspace ? workspace->bytes_sent - std::exchange(before, workspace->bytes_sent) : 0;
  };
  step.tp_bytes = count(&groups_.tp(), tp_bytes_);
  step.expert_bytes = count(groups_.experts(), expert_bytes_);
  step.cp_bytes = count(groups_.cp(), cp_bytes_);
}

void PhaseLog::end_step() {
  phases_ = recorder().phase_times();
}

void PhaseLog::add(const StepRecord& step) {
  if (!records_) return;
  double& saving = phases_[size_t(Phase::checkpoint)];
  const double before = saving;
  saving = recorder().phase_times()[size_t(Phase::checkpoint)];
  try {
    records_->add(step.step, step.step_ms + saving - before, phases_);
  } catch (const IoError& error) {
    warn_of_records(error);
    records_.reset();
  }
}

}  // namespace tandem
