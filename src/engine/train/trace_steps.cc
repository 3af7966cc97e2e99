#include "engine/train/trace_steps.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/files.h"
#include "core/log.h"
#include "engine/config/run_control.h"
#include "engine/train/rank_clocks.h"
#include "observe/trace.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kWarmupSteps = 5, kCandidates = 15, kMaxSteps = 60;
using Clock = std::chrono::steady_clock;

}  // namespace

size_t nearest_to_median(const std::vector<double>& values) {
  std::vector<double> sorted = values;
  std::sort(sorted.begin(), sorted.end());
  const double median = sorted.empty() ? 0 : sorted[sorted.size() / 2];
  const auto further = [&](double a, double b) {
    return std::abs(a - median) < std::abs(b - median);
  };
  return size_t(std::min_element(values.begin(), values.end(), further) - values.begin());
}

TraceSteps::TraceSteps(Communicator& world, const TrainConfig& config, int64_t first_step)
    : world_(world), each_(config.trace.steps), begin_(-1), end_(-1) {
  if (!config.trace.enabled) return;
  const bool timed = !ends_by_steps(config);
  const int64_t after_warmup = first_step + kWarmupSteps;
  begin_ = timed ? after_warmup : std::clamp(config.train.steps - each_, first_step, after_warmup);
  const int64_t left = timed ? kMaxSteps : std::min(config.train.steps - begin_, kMaxSteps);
  end_ = begin_ + each_ * std::clamp<int64_t>(left / each_, 1, kCandidates);
}

void TraceSteps::before_step(int64_t step) {
  if (step == begin_ && !recording_) {
    clocks_ = rank_clocks(world_);
    recorder().set_tracing(true);
    recording_ = true;
  }
  if (!recording_ || in_candidate_) return;
  recorder().take_events();  // drops events of a checkpoint between two steps
  in_candidate_ = true;
  start_ = Clock::now();
}

void TraceSteps::drop_step() {
  in_candidate_ = false;
}

void TraceSteps::after_step(int64_t step, const std::string& out) {
  if (recording_ && (step - begin_) % each_ == 0) end_candidate();
  if (step == end_) finish(out);
}

void TraceSteps::end_candidate() {
  const std::chrono::duration<double> time = Clock::now() - start_;
  candidates_.push_back({time.count(), recorder().take_events()});
  in_candidate_ = false;
}

/// Index of the candidate whose time, that of its slowest rank, is nearest to the median.
size_t TraceSteps::typical() const {
  std::vector<double> seconds;
  for (const Candidate& candidate : candidates_) seconds.push_back(candidate.seconds);
  const auto local = seconds;
  for (const auto& blob : world_.exchange(std::as_bytes(std::span(local)), "traced times")) {
    std::vector<double> remote(local.size());
    std::memcpy(remote.data(), blob.data(), std::min(blob.size(), local.size() * sizeof(double)));
    for (size_t i = 0; i < local.size(); ++i) seconds[i] = std::max(seconds[i], remote[i]);
  }
  return nearest_to_median(seconds);
}

void TraceSteps::finish(const std::string& out) {
  if (!recording_) return;
  recording_ = false;
  if (candidates_.empty()) end_candidate();
  recorder().set_tracing(false);
  const size_t chosen = typical();
  const auto clocks = rank_clocks(world_);
  const auto rank = size_t(world_.rank());
  RankEvents events{world_.rank(), std::move(candidates_[chosen].events), {}};
  align_events(events.events, clocks_[rank], clocks[rank]);
  const auto local = pack(events);
  candidates_.clear();
  std::vector<RankEvents> ranks;
  for (const auto& blob : world_.exchange(local, "trace events")) {
    ranks.push_back(unpack(blob));
    ranks.back().step = begin_ + int64_t(chosen) * each_ + 1;  // metrics.jsonl counts from 1
    const size_t last = ranks.size() - 1;
    ranks.back().clock_bound_ns = std::max(clocks_[last].bound, clocks[last].bound);
  }
  if (world_.rank() != 0) return;
  try {
    replace_file(out + "/trace.json", trace_json(ranks));
  } catch (const IoError& error) {  // a failed trace must not end the run
    log_message(LogLevel::warn, error.what());
  }
}

}  // namespace tandem
