#include "observe/recorder.h"

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

void Recorder::add(const SpanEvent& event) {
  const std::lock_guard lock(mutex_);
  seconds_[size_t(event.kind)] += std::chrono::duration<double>(event.end - event.begin).count();
  if (tracing_) events_.push_back(event);
}

double Recorder::seconds(SpanKind kind) const {
  const std::lock_guard lock(mutex_);
  return seconds_[size_t(kind)];
}

void Recorder::reset() {
  const std::lock_guard lock(mutex_);
  seconds_.fill(0);
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
