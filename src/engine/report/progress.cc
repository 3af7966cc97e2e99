#include "engine/report/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "core/system/printable.h"
#include "core/system/process/clock.h"
#include "core/system/terminal.h"

namespace tandem {
namespace {

/// 0: unknown.
size_t terminal_columns(std::FILE* out) {
  winsize size{};
  return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

/// Ignores write errors: a full log must not end a run.
void show(std::FILE* out, const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), out);
  std::fflush(out);
}

}  // namespace

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "--:--";
  const auto whole = int64_t(std::lround(seconds));
  const int64_t hours = whole / 3600, minutes = whole / 60 % 60, rest = whole % 60;
  return hours ? fmt::format("{}:{:02}:{:02}", hours, minutes, rest)
               : fmt::format("{}:{:02}", minutes, rest);
}

std::string format_count(double value) {
  if (std::abs(value) < 1000) return fmt::format("{:.0f}", value);
  if (std::abs(value) < 1e6) return fmt::format("{:.3g}k", value / 1e3);
  if (std::abs(value) < 1e9) return fmt::format("{:.3g}M", value / 1e6);
  return fmt::format("{:.3g}G", value / 1e9);
}

std::string format_bytes(double bytes) {
  if (bytes < 1e3) return fmt::format("{:.0f} bytes", bytes);
  if (bytes < 1e6) return fmt::format("{:.1f} kB", bytes / 1e3);
  if (bytes < 1e9) return fmt::format("{:.1f} MB", bytes / 1e6);
  return fmt::format("{:.1f} GB", bytes / 1e9);
}

std::string describe(const RunProgress& progress, double eta_s) {
  const bool timed = progress.seconds > 0;
  const double done = timed ? progress.elapsed_s : double(progress.step);
  const double all = timed ? progress.seconds : double(progress.steps);
  std::string text =
      timed ? fmt::format("{} {}  {}/{}", progress.unit, progress.step,
                          format_duration(progress.elapsed_s), format_duration(progress.seconds))
            : fmt::format("{} {:>{}}/{}", progress.unit, progress.step,
                          fmt::formatted_size("{}", progress.steps), progress.steps);
  text += fmt::format(" {:5.1f}%", all > 0 ? std::min(100.0, 100 * done / all) : 0);
  if (!std::isnan(progress.loss)) text += fmt::format("  loss {:.4f}", progress.loss);
  if (progress.tokens_per_s > 0) {
    text += fmt::format("  {} tok/s", format_count(progress.tokens_per_s));
  }
  text += "  ETA " + format_duration(eta_s);
  if (progress.lr > 0) text += fmt::format("  lr {:.1e}", progress.lr);
  if (progress.grad_norm > 0) text += fmt::format("  grad {:.2f}", progress.grad_norm);
  if (progress.mfu > 0) text += fmt::format("  MFU {:.0f}%", 100 * progress.mfu);
  return text;
}

ProgressLine::ProgressLine(std::FILE* out) : ProgressLine(out, is_terminal(out)) {}
ProgressLine::ProgressLine(std::FILE* out, bool terminal) : out_(out), terminal_(terminal) {}
ProgressLine::~ProgressLine() {
  finish();
}

void ProgressLine::update(const RunProgress& progress) {
  const bool first = !started_;
  if (first) {
    started_ = true;
    start_ = Clock::now();
    first_step_ = progress.step;
  }
  last_ = progress;
  pending_ = true;
  if (first || seconds_since(printed_) >= (terminal_ ? 0.1 : 5.0)) print();
}

void ProgressLine::print() {
  const int64_t done = last_.step - first_step_;
  double eta =
      done > 0 ? seconds_since(start_) / double(done) * double(last_.steps - last_.step) : -1;
  if (last_.seconds > 0) eta = std::max(0.0, last_.seconds - last_.elapsed_s);
  put_line(describe(last_, eta));
  pending_ = false;
}

void ProgressLine::put_line(std::string text) {
  if (const size_t columns = terminal_ ? terminal_columns(out_) : 0;
      text.size() >= columns && columns) {
    text.resize(columns - 1);
  }
  show(out_, fmt::format("{}{}{}", terminal_ ? "\r" : "", text, terminal_ ? "\x1b[K" : "\n"));
  on_line_ = terminal_;
  printed_ = Clock::now();
}

void ProgressLine::meanwhile(const std::string& text) {
  if (seconds_since(printed_) >= (terminal_ ? 0.1 : 5.0)) put_line(text);
}

void ProgressLine::note(const std::string& text) {
  show(out_, fmt::format("{}{}\n", on_line_ ? "\r\x1b[K" : "", single_line(text)));
  const bool redraw = on_line_ && started_;
  on_line_ = false;
  if (redraw) print();
}

void ProgressLine::finish() {
  if (pending_) print();
  if (on_line_) show(out_, "\n");
  on_line_ = false;
}

}  // namespace tandem
