// The line that says how a long run is doing. On a terminal one line, as wide as that at most, is
// redrawn in place, at most ten times a second; elsewhere (pipe, log file) plain lines are printed,
// at most one in five seconds, plus the first and the last.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace tandem {

struct Progress {
  int64_t step = 0, steps = 0;  ///< finished, of all
  double loss = 0;              ///< nats per token; NaN: not shown
  double tokens_per_s = 0;      ///< 0: not shown
  /// Where `seconds` is not 0 the run ends with them, and `steps` counts for nothing.
  double elapsed_s = 0, seconds = 0;
  const char* unit = "step";
  double lr = 0, grad_norm = 0, mfu = 0;  ///< of training; 0: not shown
};

/// "step   120/2000   6.0%  loss 2.3456  12.3k tok/s  ETA 1:23  lr 1.2e-03  grad 0.52  MFU 41%",
/// or, when it ends with its seconds, "step 120  0:07/1:50   6.0%  loss 2.3456  12.3k tok/s  ETA
/// 1:43  lr 1.2e-03  grad 0.52  MFU 41%"
std::string describe(const Progress& progress, double eta_s);
/// "0:42", "1:02:03"; "--:--" when negative or not finite.
std::string format_duration(double seconds);
/// "32 bytes", "32.4 kB", "4.6 MB"
std::string format_bytes(double bytes);
/// "950", "12.3k", "4.56M"
std::string format_count(double value);

/// Prints to `out`. Make one on rank 0 only.
class ProgressLine {
 public:
  /// Terminal or not is taken from `out` (and TERM=dumb counts as not).
  explicit ProgressLine(std::FILE* out = stderr);
  ProgressLine(std::FILE* out, bool terminal);
  ~ProgressLine();  ///< calls `finish`
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  /// Cheap when there is nothing to print. The ETA comes from the pace since the first update, so a
  /// resumed run is timed from where it resumed.
  void update(const Progress& progress);
  /// Prints `text` on a line of its own, above the progress line.
  void note(const std::string& text);
  /// Shows `text`, what is done between two updates, in place of the line and no more often.
  void meanwhile(const std::string& text);
  /// Prints the last update if it was not shown, and ends the line.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  void print();
  void put_line(std::string text);

  std::FILE* out_;
  bool terminal_;
  Progress last_;
  int64_t first_step_ = 0;
  bool started_ = false, pending_ = false, on_line_ = false;
  Clock::time_point start_, printed_;
};

}  // namespace tandem
