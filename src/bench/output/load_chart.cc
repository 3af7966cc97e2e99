#include "bench/output/load_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

constexpr double kWidth = 640, kHeight = 400, kLeft = 70, kRight = 20, kTop = 30, kBottom = 50;

/// 1, 2 or 5 times a power of ten, at least `value`.
double rounded_up(double value) {
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= value) return factor * power;
  }
  return 10 * power;
}

}  // namespace

std::string load_chart(std::span<const LoadPoint> points) {
  double max_rate = 1, first = HUGE_VAL, last = 0;
  for (const LoadPoint& point : points) {
    max_rate = std::max(max_rate, point.tokens_per_s);
    if (point.p50_ms > 0) first = std::min(first, point.p50_ms);
    last = std::max(last, point.p99_ms);
  }
  if (first >= last) first = std::max(last, 1e-3) / 2, last = 2 * first;
  const double top = rounded_up(max_rate), low = std::log10(first) - 0.1,
               high = std::log10(last) + 0.1;
  const auto x = [&](double ms) {
    const double at = (std::log10(std::max(ms, first / 2)) - low) / (high - low);
    return kLeft + std::clamp(at, 0.0, 1.0) * (kWidth - kLeft - kRight);
  };
  const auto y = [&](double rate) {
    return kHeight - kBottom - rate / top * (kHeight - kTop - kBottom);
  };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" "
      "font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n",
      kWidth, kHeight);
  for (int i = 0; i <= 4; ++i) {
    const double rate = top * i / 4;
    svg += fmt::format(
        "<path d=\"M{:.1f} {:.1f}H{}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1f}\" "
        "text-anchor=\"end\">{:g}</text>\n",
        kLeft, y(rate), kWidth - kRight, kLeft - 8, y(rate) + 4, rate);
  }
  for (double ms = std::pow(10, std::floor(low)); std::log10(ms) <= high; ms *= 10) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      if (std::log10(factor * ms) < low || std::log10(factor * ms) > high) continue;
      svg += fmt::format(
          "<path d=\"M{:.1f} {}V{}\" stroke=\"#ddd\"/><text x=\"{:.1f}\" y=\"{}\" "
          "text-anchor=\"middle\">{:g}</text>\n",
          x(factor * ms), kTop, kHeight - kBottom, x(factor * ms), kHeight - kBottom + 18,
          factor * ms);
    }
  }
  svg += fmt::format(
      "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">mean time between the tokens of a text, "
      "ms</text>\n"
      "<text x=\"{}\" y=\"18\">tokens/s</text>\n",
      (kLeft + kWidth - kRight) / 2, kHeight - 12, kLeft - 40);
  struct Line {
    const char *name, *color;
    double LoadPoint::*ms;
  };
  int index = 0;
  for (const Line& line : {Line{"median", "#1565c0", &LoadPoint::p50_ms},
                           Line{"99th percentile", "#c62828", &LoadPoint::p99_ms}}) {
    std::string path, marks;
    for (const LoadPoint& point : points) {
      const double px = x(point.*line.ms), py = y(point.tokens_per_s);
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px, py);
      marks += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>", px, py,
                           line.color);
      if (index == 0) {
        marks +=
            fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", px + 7, py - 6, point.name);
      }
    }
    svg += fmt::format(
        "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>{}\n"
        "<text x=\"{}\" y=\"18\" fill=\"{}\">{}</text>\n",
        path, line.color, marks, kLeft + 60 + 70 * index++, line.color, line.name);
  }
  return svg + "</svg>\n";
}

}  // namespace tandem
