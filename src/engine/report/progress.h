// Progress line of a long run. On a terminal one line, at most as wide as the terminal, is redrawn
// in place at most ten times a second; elsewhere (pipe, log file) separate lines are printed, at
// most one in five seconds, plus the first and the last.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace tandem {

struct RunProgress {
  int64_t step = 0, steps = 0;  ///< finished, and total
  double loss = 0;              ///< nats per token; NaN: not shown
  double tokens_per_s = 0;      ///< 0: not shown
  /// If `seconds` is not 0, the run ends at that time and `steps` is ignored.
  double elapsed_s = 0, seconds = 0;
  const char* unit = "step";
  double lr = 0, grad_norm = 0, mfu = 0;  ///< training only; 0: not shown
};

/// "step   120/2000   6.0%  loss 2.3456  12.3k tok/s  ETA 1:23  lr 1.2e-03  grad 0.52  MFU 41%",
/// or, if it ends by time, "step 120  0:07/1:50   6.0%  loss 2.3456  12.3k tok/s  ETA 1:43  lr
/// 1.2e-03  grad 0.52  MFU 41%"
std::string describe(const RunProgress& progress, double eta_s);
/// "0:42", "1:02:03"; "--:--" if negative or not finite.
std::string format_duration(double seconds);
/// "32 bytes", "32.4 kB", "4.6 MB"
std::string format_bytes(double bytes);
/// "950", "12.3k", "4.56M"
std::string format_count(double value);

/// Prints to `out`. Construct on rank 0 only.
class ProgressLine {
 public:
  /// Detects a terminal from `out` (TERM=dumb counts as none).
  explicit ProgressLine(std::FILE* out = stderr);
  ProgressLine(std::FILE* out, bool terminal);
  ~ProgressLine();  ///< calls `finish`
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// Cheap if nothing is due for printing. The ETA is based on the pace since the first update, so
  /// a resumed run is timed from its resumption.
  void update(const RunProgress& progress);
  /// Prints `text` on a separate line, above the progress line.
  void note(const std::string& text);
  /// Shows `text`, activity between two updates, in place of the progress line, rate-limited
  /// likewise.
  void meanwhile(const std::string& text);
  /// Prints the last update if it was not shown, and ends the line.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  void print();
  void put_line(std::string text);

  std::FILE* out_;
  bool terminal_;
  RunProgress last_;
  int64_t first_step_ = 0;
  bool started_ = false, pending_ = false, on_line_ = false;
  Clock::time_point start_, printed_;
};

}  // namespace tandem
