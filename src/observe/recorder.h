// Time accounting of a rank. Each rank's thread has a Recorder; a ScopedSpan adds its duration to
// the total of its kind (always on: two clock reads) and, while tracing, stores an event for the
// timeline. Spans do not nest, except in those of recomputation.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "observe/phases.h"
#include "observe/progress_words.h"

namespace tandem {

enum class SpanKind : uint8_t {
  gemm,        ///< matrix products
  compute,     ///< other computation
  wait,        ///< exposed communication: time that computation waited for it
  transfer,    ///< transfer time; overlaps the others, on the link's own lane
  data,        ///< input data
  checkpoint,  ///< saving of checkpoints
  recompute,   ///< forward passes that run again for a backward pass; contains spans of all others
};
constexpr int kSpanKinds = 7;
std::string_view name_of(SpanKind kind);

using TimePoint = std::chrono::steady_clock::time_point;

struct SpanEvent {
  SpanKind kind;
  const char* name;  ///< static storage: "ag_gemm"
  TimePoint begin, end;
  int32_t tile = -1, peer = -1;
  int32_t processor = -1;  ///< SM of a GPU
};

class Recorder {
 public:
  explicit Recorder(int rank = 0) : rank_(rank) {}
  int rank() const { return rank_; }
  void set_rank(int rank) { rank_ = rank; }
  void set_tracing(bool on) { tracing_ = on; }
  bool tracing() const { return tracing_; }
  void add(const SpanEvent& event);
  /// Seconds spent in `kind` since construction or `reset`.
  double seconds(SpanKind kind) const;
  /// Milliseconds by phase, likewise.
  PhaseTimes phase_times() const;
  void reset();
  /// Phase of computation or, if it is one of waits, of waits from now on; returns the one before.
  Phase set_phase(Phase phase);
  /// Moves the recorded events out.
  std::vector<SpanEvent> take_events();

 private:
  mutable std::mutex mutex_;  // a trace is taken while other threads may add events
  int rank_;
  bool tracing_ = false;
  std::array<double, kSpanKinds> seconds_{};
  PhaseTimes phases_{};
  Phase work_phase_ = Phase::update, wait_phase_ = Phase::tp_wait;
  std::vector<SpanEvent> events_;
};

/// Recorder of the calling thread: the one set by `bind`, else a default one.
Recorder& recorder();
void bind(Recorder* recorder);

/// Operator that the calling thread's GEMMs are part of, for their spans.
struct SpanLabel {
  const char* name;
  int32_t tile;
};
SpanLabel product_label();

/// Labels this thread's GEMMs during its lifetime: "ag_gemm", tile 3.
class ScopedLabel {
 public:
  ScopedLabel(const char* name, int tile);
  ~ScopedLabel();
  ScopedLabel(const ScopedLabel&) = delete;
  ScopedLabel& operator=(const ScopedLabel&) = delete;

 private:
  SpanLabel outer_;
};

/// Computation, or waits, during its lifetime belong to a phase.
class ScopedPhase {
 public:
  explicit ScopedPhase(Phase phase) : outer_(recorder().set_phase(phase)) {}
  ~ScopedPhase() { recorder().set_phase(outer_); }
  ScopedPhase(const ScopedPhase&) = delete;
  ScopedPhase& operator=(const ScopedPhase&) = delete;

 private:
  Phase outer_;
};

class ScopedSpan {
 public:
  ScopedSpan(SpanKind kind, const char* name, int tile = -1, int peer = -1)
      : event_{kind, name, std::chrono::steady_clock::now(), {}, tile, peer} {
    if (outer_ != RankActivity::file) {
      begin_activity(reads_files() ? RankActivity::file : RankActivity::work, name, event_.begin);
    }
  }
  ~ScopedSpan() {
    event_.end = std::chrono::steady_clock::now();
    if (reads_files()) begin_activity(outer_, "", event_.end);
    recorder().add(event_);
  }
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  bool reads_files() const {
    return event_.kind == SpanKind::data || event_.kind == SpanKind::checkpoint;
  }

  SpanEvent event_;
  const RankActivity outer_ = current_activity();  // of spans within file access, that
};

/// Span of a wait of that phase.
class ScopedWait {
 public:
  ScopedWait(Phase phase, const char* name, int tile = -1, int peer = -1)
      : phase_(phase), span_(SpanKind::wait, name, tile, peer) {}

 private:
  ScopedPhase phase_;
  ScopedSpan span_;
};

}  // namespace tandem
