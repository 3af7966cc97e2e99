// Time accounting of a rank. Each rank's thread has a Recorder; a ScopedSpan adds its duration to
// the total of its kind (always on: two clock reads) and, while tracing, stores an event for the
// timeline. Spans do not nest, except in those of recomputation and of pipeline passes.
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
  pass,        ///< pass of a microbatch through a pipeline stage; contains spans of all others
};
constexpr int kSpanKinds = 8;
std::string_view name_of(SpanKind kind);

using TimePoint = std::chrono::steady_clock::time_point;

enum class FlowRole : uint8_t { none, send, receive, collective };

/// Communication that a span belongs to, from which arrows between ranks are drawn.
struct Flow {
  FlowRole role = FlowRole::none;
  int32_t ranks = 0;    ///< of a collective
  uint32_t stream = 0;  ///< messages or calls of a communicator; equal on its ranks
  int64_t number = 0;   ///< of the message between two ranks, or of the call, in the stream
};

/// Other rank of a span's communication.
struct SpanPeer {
  int32_t rank = -1;
  Flow flow = {};
  SpanPeer(int32_t rank_ = -1, const Flow& flow_ = {}) : rank(rank_), flow(flow_) {}
};

struct SpanEvent {
  SpanKind kind;
  const char* name;  ///< static storage: "ag_gemm"
  TimePoint begin, end;
  int32_t tile = -1, peer = -1;  ///< peer: rank of the world
  int32_t processor = -1;        ///< SM of a GPU
  Flow flow = {};
  int32_t microbatch = -1, stage = -1;  ///< of the pipeline pass that it is part of
};

/// Events that a recorder stores until they are taken (6 MiB); further ones are dropped.
constexpr size_t kMaxEvents = size_t{1} << 16;

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
  /// Pipeline pass of the spans that follow; -1: none. Returns the one before.
  struct Pass {
    int32_t microbatch = -1, stage = -1;
  };
  Pass set_pass(Pass pass);
  /// Moves the recorded events out.
  std::vector<SpanEvent> take_events();
  /// Events dropped since the last call.
  int64_t take_dropped();

  /// Sets the clock of events and `now` ahead and lets it gain `ppm` from now on, for tests of what
  /// aligns clocks.
  void shift_clock(std::chrono::nanoseconds ahead, double ppm);
  /// Time on the clock of the events.
  TimePoint now() const;

 private:
  mutable std::mutex mutex_;  // a trace is taken while other threads may add events
  int rank_;
  bool tracing_ = false;
  std::array<double, kSpanKinds> seconds_{};
  PhaseTimes phases_{};
  Phase work_phase_ = Phase::update, wait_phase_ = Phase::tp_wait;
  Pass pass_;
  std::vector<SpanEvent> events_;
  int64_t dropped_ = 0;
  struct ClockFault {
    std::chrono::nanoseconds ahead{0};
    double ppm = 0;
    TimePoint since{};
    TimePoint at(TimePoint time) const;
  };
  ClockFault clock_;
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
  ScopedSpan(SpanKind kind, const char* name, int tile = -1, const SpanPeer& peer = {})
      : event_{kind, name, std::chrono::steady_clock::now(), {}, tile, peer.rank, -1, peer.flow} {
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
  ScopedWait(Phase phase, const char* name, int tile = -1, const SpanPeer& peer = {})
      : phase_(phase), span_(SpanKind::wait, name, tile, peer) {}

 private:
  ScopedPhase phase_;
  ScopedSpan span_;
};

/// Pass of a microbatch through a stage, for the spans in it and as a span. `name`: a literal.
class ScopedPass {
 public:
  ScopedPass(const char* name, int microbatch, int stage)
      : name_(name),
        begin_(std::chrono::steady_clock::now()),
        outer_(recorder().set_pass({microbatch, stage})) {
    begin_activity(RankActivity::work, name, begin_);  // GPU kernels have no spans
  }
  ~ScopedPass() {
    recorder().add({SpanKind::pass, name_, begin_, std::chrono::steady_clock::now()});
    recorder().set_pass(outer_);
  }
  ScopedPass(const ScopedPass&) = delete;
  ScopedPass& operator=(const ScopedPass&) = delete;

 private:
  const char* name_;
  TimePoint begin_;
  Recorder::Pass outer_;
};

}  // namespace tandem
