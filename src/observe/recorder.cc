#include "observe/recorder.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "observe/slowdown.h"

namespace tandem {
namespace {

using SleepClock = std::chrono::steady_clock;
constexpr double kMinSleep = 3e-4;  // seconds: shorter ones are imprecise

struct Slowdown {
  PhaseTimes shares{};
  double owed = 0;  // seconds
  bool is_on = false;
};
thread_local Slowdown slowdown;

/// Span after which the process is killed.
struct LastSpan {
  std::optional<Phase> phase;
  std::string name;
};
thread_local std::vector<LastSpan> last_spans;

void end_with(std::optional<Phase> phase, const char* name) {
  for (const LastSpan& last : last_spans) {
    if (last.phase && last.phase != phase) continue;
    if (last.name.empty() || last.name == name) ::kill(::getpid(), SIGKILL);
  }
}

/// Phase of a span among those of computation and of waits; nothing if it is in no phase's time.
std::optional<Phase> phase_of(SpanKind kind, Phase work, Phase wait) {
  switch (kind) {
    case SpanKind::gemm:
    case SpanKind::compute:
      return work;
    case SpanKind::wait:
      return wait;
    case SpanKind::data:
      return Phase::data;
    case SpanKind::checkpoint:
      return Phase::checkpoint;
    case SpanKind::transfer:   // overlaps others
    case SpanKind::recompute:  // contains others
    case SpanKind::pass:
      break;
  }
  return {};
}

/// Sleeps after a computation of these seconds, and returns their sum.
double lengthen(double seconds, double share) {
  slowdown.owed += seconds * share;
  if (slowdown.owed < kMinSleep) return seconds;
  const auto begin = SleepClock::now();
  std::this_thread::sleep_for(std::chrono::duration<double>(slowdown.owed));
  const double slept = std::chrono::duration<double>(SleepClock::now() - begin).count();
  slowdown.owed -= slept;
  return seconds + slept;
}

}  // namespace

void slow_down(const PhaseTimes& shares) {
  slowdown = {shares, 0, std::ranges::any_of(shares, [](double share) { return share > 0; })};
}

void kill_after_span(std::optional<Phase> phase, const std::string& name) {
  last_spans.push_back({phase, name});
}

void cancel_kills() {
  last_spans.clear();
}

std::string_view name_of(SpanKind kind) {
  switch (kind) {
    case SpanKind::gemm:
      return "gemm";
    case SpanKind::compute:
      return "compute";
    case SpanKind::wait:
      return "wait";
    case SpanKind::transfer:
      return "transfer";
    case SpanKind::data:
      return "data";
    case SpanKind::checkpoint:
      return "checkpoint";
    case SpanKind::recompute:
      return "recompute";
    case SpanKind::pass:
      return "pass";
  }
  return "?";
}

void Recorder::add(const SpanEvent& event) {
  double seconds = std::chrono::duration<double>(event.end - event.begin).count();
  const bool is_computation = event.kind == SpanKind::gemm || event.kind == SpanKind::compute;
  if (slowdown.is_on && is_computation) {
    seconds = lengthen(seconds, slowdown.shares[size_t(work_phase_)]);
  }
  const std::lock_guard lock(mutex_);
  seconds_[size_t(event.kind)] += seconds;
  const std::optional<Phase> phase = phase_of(event.kind, work_phase_, wait_phase_);
  if (phase) phases_[size_t(*phase)] += seconds * 1e3;
  if (!last_spans.empty()) end_with(phase, event.name);
  if (!tracing_) return;
  if (events_.size() >= kMaxEvents) {
    ++dropped_;
    return;
  }
  SpanEvent& stored = events_.emplace_back(event);
  stored.begin = clock_.at(event.begin), stored.end = clock_.at(event.end);
  stored.microbatch = pass_.microbatch, stored.stage = pass_.stage;
}

double Recorder::seconds(SpanKind kind) const {
  const std::lock_guard lock(mutex_);
  return seconds_[size_t(kind)];
}

PhaseTimes Recorder::phase_times() const {
  const std::lock_guard lock(mutex_);
  return phases_;
}

void Recorder::reset() {
  const std::lock_guard lock(mutex_);
  seconds_.fill(0);
  phases_.fill(0);
}

Phase Recorder::set_phase(Phase phase) {
  const std::lock_guard lock(mutex_);
  return std::exchange(is_work(phase) ? work_phase_ : wait_phase_, phase);
}

Recorder::Pass Recorder::set_pass(Pass pass) {
  const std::lock_guard lock(mutex_);
  return std::exchange(pass_, pass);
}

std::vector<SpanEvent> Recorder::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

int64_t Recorder::take_dropped() {
  const std::lock_guard lock(mutex_);
  return std::exchange(dropped_, 0);
}

void Recorder::shift_clock(std::chrono::nanoseconds ahead, double ppm) {
  const std::lock_guard lock(mutex_);
  clock_ = {ahead, ppm, std::chrono::steady_clock::now()};
}

TimePoint Recorder::now() const {
  const TimePoint time = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  return clock_.at(time);
}

TimePoint Recorder::ClockFault::at(TimePoint time) const {
  const std::chrono::duration<double, std::nano> elapsed = time - since;
  const auto gained = std::chrono::nanoseconds(ppm == 0 ? 0 : int64_t(elapsed.count() * ppm / 1e6));
  return time + std::chrono::duration_cast<TimePoint::duration>(ahead + gained);
}

namespace {
thread_local Recorder thread_recorder;
thread_local Recorder* bound_recorder = nullptr;
thread_local SpanLabel label{"gemm", -1};
}  // namespace

Recorder& recorder() {
  return bound_recorder ? *bound_recorder : thread_recorder;
}
void bind(Recorder* recorder) {
  bound_recorder = recorder;
}

SpanLabel product_label() {
  return label;
}
ScopedLabel::ScopedLabel(const char* name, int tile)
    : outer_(std::exchange(label, SpanLabel{name, tile})) {}
ScopedLabel::~ScopedLabel() {
  label = outer_;
}

}  // namespace tandem
