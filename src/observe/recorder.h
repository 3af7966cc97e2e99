// Where a rank's time goes. Each rank's thread has a Recorder; a ScopedSpan adds its duration to
// the total of its kind (always on: two clock reads) and, while tracing, keeps an event for the
// timeline. Spans of the kinds counted below do not nest.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace tandem {

enum class SpanKind : uint8_t {
  gemm,        ///< matrix products
  compute,     ///< everything else that computes
  wait,        ///< communication that computation had to wait for: the exposed part
  transfer,    ///< bytes on the wire; runs beside the others, on the link's own lane
  data,        ///< input
  checkpoint,  ///< saving
};
constexpr int kSpanKinds = 6;
std::string_view name_of(SpanKind kind);

using TimePoint = std::chrono::steady_clock::time_point;

struct SpanEvent {
  SpanKind kind;
  const char* name;  ///< static storage: "ag_gemm"
  TimePoint begin, end;
  int32_t tile = -1, peer = -1;
  int32_t processor = -1;  ///< multiprocessor of a GPU
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
  void reset();
  /// Moves the events out.
  std::vector<SpanEvent> take_events();

 private:
  mutable std::mutex mutex_;  // a trace is taken while other threads may add
  int rank_;
  bool tracing_ = false;
  std::array<double, kSpanKinds> seconds_{};
  std::vector<SpanEvent> events_;
};

/// The calling thread's recorder (its own default one unless `bind` gave it another).
Recorder& recorder();
void bind(Recorder* recorder);

/// What the calling thread's matrix products are part of, for their spans.
struct SpanLabel {
  const char* name;
  int32_t tile;
};
SpanLabel product_label();

/// Labels this thread's matrix products until it ends: "ag_gemm", tile 3.
class ScopedLabel {
 public:
  ScopedLabel(const char* name, int tile);
  ~ScopedLabel();
  ScopedLabel(const ScopedLabel&) = delete;
  ScopedLabel& operator=(const ScopedLabel&) = delete;

 private:
  SpanLabel outer_;
};

class ScopedSpan {
 public:
  ScopedSpan(SpanKind kind, const char* name, int tile = -1, int peer = -1)
      : event_{kind, name, std::chrono::steady_clock::now(), {}, tile, peer} {}
  ~ScopedSpan() {
    event_.end = std::chrono::steady_clock::now();
    recorder().add(event_);
  }
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  SpanEvent event_;
};

}  // namespace tandem
