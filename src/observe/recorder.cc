#include "observe/recorder.h"

#include <optional>
#include <utility>

namespace tandem {

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
  }
  return "?";
}

namespace {

/// Phase of a span; nullopt for one that overlaps or contains others.
std::optional<Phase> phase_of(const SpanEvent& event, Phase of_computation) {
  switch (event.kind) {
    case SpanKind::gemm:
    case SpanKind::compute:
      return of_computation;
    case SpanKind::wait:
      return phase_of_wait(event.name);
    case SpanKind::data:
      return Phase::data;
    case SpanKind::checkpoint:
      return Phase::checkpoint;
    case SpanKind::transfer:
    case SpanKind::recompute:
      break;
  }
  return {};
}

}  // namespace

void Recorder::add(const SpanEvent& event) {
  const std::lock_guard lock(mutex_);
  const double seconds = std::chrono::duration<double>(event.end - event.begin).count();
  seconds_[size_t(event.kind)] += seconds;
  if (const auto phase = phase_of(event, phase_)) phases_[size_t(*phase)] += seconds * 1e3;
  if (tracing_) events_.push_back(event);
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
  return std::exchange(phase_, phase);
}

std::vector<SpanEvent> Recorder::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
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
