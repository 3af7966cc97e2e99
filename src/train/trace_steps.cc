#include "train/trace_steps.h"

#include <algorithm>
#include <vector>

#include "observe/trace.h"

namespace tandem {
namespace {

constexpr int64_t kSettle = 3;

}  // namespace

TraceSteps::TraceSteps(Communicator& world, const TrainConfig& config, int64_t first_step)
    : world_(world) {
  const bool on = config.trace.enabled;
  const int64_t latest =
      config.train.seconds > 0 ? first_step + kSettle : config.train.steps - config.trace.steps;
  begin_ = on ? std::max(first_step, std::min(first_step + kSettle, latest)) : -1;
  end_ = on ? begin_ + config.trace.steps : -1;
}

void TraceSteps::before_step(int64_t step) {
  if (step != begin_) return;
  world_.barrier("trace");
  origin_ = std::chrono::steady_clock::now();
  recorder().set_tracing(true);
  recording_ = true;
}

void TraceSteps::after_step(int64_t step, const std::string& out) {
  if (step == end_) finish(out);
}

void TraceSteps::finish(const std::string& out) {
  if (!recording_) return;
  recording_ = false;
  recorder().set_tracing(false);
  const auto mine = pack({world_.rank(), recorder().take_events(), origin_});
  std::vector<RankEvents> ranks;
  for (const auto& blob : world_.exchange(mine, "trace events")) ranks.push_back(unpack(blob));
  if (world_.rank() == 0) write_trace(out + "/trace.json", ranks);
}

}  // namespace tandem
