#include "engine/train/trace_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "comm/rank_clocks.h"
#include "core/system/files.h"
#include "core/system/log.h"
#include "observe/trace.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kWarmupSteps = 5, kCandidates = 15, kMaxSteps = 60;
constexpr int64_t kStreamClockSteps = 16;  // between two measurements of the clocks
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

TraceSteps::TraceSteps(Communicator& world, const TraceConfig& trace, const RunConfig& train,
                       int64_t first_step, const std::string& out)
    : world_(world),
      out_(out),
      each_(trace.steps),
      begin_(-1),
      end_(-1),
      max_stream_bytes_(trace.stream_mib << 20),
      first_step_(first_step) {
  if (!trace.enabled) return;
  const bool timed = !train.ends_by_steps();
  const int64_t after_warmup = first_step + kWarmupSteps;
  begin_ = timed ? after_warmup : std::clamp(train.steps - each_, first_step, after_warmup);
  const int64_t left = timed ? kMaxSteps : std::min(train.steps - begin_, kMaxSteps);
  end_ = begin_ + each_ * std::clamp<int64_t>(left / each_, 1, kCandidates);
}

template <typename Write>
void TraceSteps::to_stream(const Write& write) {
  if (!stream_) return;
  try {
    write(*stream_);
  } catch (const IoError& error) {
    log_message(LogLevel::warn, fmt::format("{}: no further events of this rank", error.what()));
    stream_.reset();
  }
}

void TraceSteps::measure_stream_clock() {
  const ClockOffset clock = rank_clocks(world_)[size_t(world_.rank())];
  to_stream([&](SpanWriter& stream) { stream.add_clock(clock); });
}

void TraceSteps::before_step(int64_t step) {
  if (max_stream_bytes_ > 0 && !streams_) {
    streams_ = true;
    try {
      stream_.emplace(out_ + "/trace", world_.rank(), world_.size(), max_stream_bytes_);
    } catch (const IoError& error) {
      log_message(LogLevel::warn, error.what());
    }
    recorder().set_tracing(true);
  }
  if (step == begin_ && !recording_) {
    recorder().set_tracing(true);
    recording_ = true;
  }
  if (!streams_ && !recording_) return;
  take_events();  // those between two steps, as of a checkpoint, are in no candidate
  step_ = step + 1;
  if (streams_ && (step - first_step_) % kStreamClockSteps == 0) measure_stream_clock();
  if (recording_ && !in_candidate_) begin_candidate();
}

bool TraceSteps::measures_clocks_after(int64_t step, bool dropped) const {
  const bool streams = max_stream_bytes_ > 0 && (step - first_step_) % kStreamClockSteps == 0;
  const bool is_traced = begin_ >= 0 && step >= begin_ && step <= end_;
  return streams || (is_traced && (dropped || (step - begin_) % each_ == 0));
}

/// Events since the last call: to the stream, and to the candidate if one has begun.
void TraceSteps::take_events() {
  std::vector<SpanEvent> events = recorder().take_events();
  const int64_t dropped = recorder().take_dropped();
  if (in_candidate_) {
    const size_t room = kMaxTraceEvents - num_events_ - candidate_.events.size();
    candidate_.is_cut = candidate_.is_cut || dropped > 0 || events.size() > room;
    candidate_.events.insert(candidate_.events.end(), events.begin(),
                             events.begin() + ptrdiff_t(std::min(events.size(), room)));
  }
  to_stream([&](SpanWriter& stream) { stream.add_events(step_, std::move(events), dropped); });
}

void TraceSteps::begin_candidate() {
  candidate_ = {0, clocks_.size(), false, {}};
  clocks_.push_back(rank_clocks(world_));
  in_candidate_ = true;
  start_ = Clock::now();
}

void TraceSteps::drop_step() {
  if (recording_ || streams_) take_events();
  in_candidate_ = false;
}

void TraceSteps::after_step(int64_t step) {
  if (!recording_ && !streams_) return;
  take_events();
  if (recording_ && (step - begin_) % each_ == 0) end_candidate();
  if (step == end_) write_typical();
}

void TraceSteps::end_candidate() {
  const std::chrono::duration<double> time = Clock::now() - start_;
  candidate_.seconds = time.count();
  num_events_ += candidate_.events.size();
  candidates_.push_back(std::move(candidate_));
  in_candidate_ = false;
}

/// Index of the candidate whose time, that of its slowest rank, is nearest to the median.
size_t TraceSteps::typical() const {
  constexpr double kCut = 1e9;  // s: further from the median than all others
  std::vector<double> seconds;
  for (const Candidate& candidate : candidates_) {
    seconds.push_back(candidate.is_cut ? kCut : candidate.seconds);
  }
  const auto local = seconds;
  for (const auto& blob : world_.exchange(std::as_bytes(std::span(local)), "traced times")) {
    std::vector<double> remote(local.size());
    std::memcpy(remote.data(), blob.data(), std::min(blob.size(), local.size() * sizeof(double)));
    for (size_t i = 0; i < local.size(); ++i) seconds[i] = std::max(seconds[i], remote[i]);
  }
  return nearest_to_median(seconds);
}

void TraceSteps::write_typical() {
  if (!std::exchange(recording_, false)) return;
  if (candidates_.empty()) {
    if (!in_candidate_) begin_candidate();
    end_candidate();
  }
  if (!streams_) recorder().set_tracing(false);
  const size_t chosen = typical();
  clocks_.push_back(rank_clocks(world_));
  const auto& first = clocks_[candidates_[chosen].first_clock];
  const auto& last = clocks_[candidates_[chosen].first_clock + 1];
  const auto rank = size_t(world_.rank());
  RankEvents events{world_.rank(), std::move(candidates_[chosen].events), {}};
  align_events(events.events, first[rank], last[rank]);
  const auto local = pack(events);
  candidates_.clear();
  std::vector<RankEvents> ranks;
  for (const auto& blob : world_.exchange(local, "trace events")) {
    ranks.push_back(unpack(blob));
    ranks.back().step = begin_ + int64_t(chosen) * each_ + 1;  // metrics.jsonl counts from 1
    const size_t of = ranks.size() - 1;
    ranks.back().clock_bound_ns = bound_between(first[of], last[of]);
  }
  clocks_.clear();
  if (world_.rank() != 0) return;
  try {
    replace_file(out_ + "/trace.json", trace_json(ranks));
  } catch (const IoError& error) {  // a failed trace must not end the run
    log_message(LogLevel::warn, error.what());
  }
}

void TraceSteps::finish() {
  if (recording_ || streams_) take_events();
  write_typical();
  if (!std::exchange(streams_, false)) return;
  recorder().set_tracing(false);
  measure_stream_clock();
  stream_.reset();
}

}  // namespace tandem
