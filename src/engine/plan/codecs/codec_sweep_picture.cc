// Picture of a sweep of wire formats: bytes sent by a rank per token, and their cost.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/plan/codecs/codec_sweep.h"

namespace tandem {

namespace {

/// Format in the picture.
struct Mark {
  double x = 0, y = 0, label_y = 0;
  std::string name;
};

/// Spreads the labels of vertically aligned marks by a line's height, as close to their marks as
/// possible.
void spread_labels(std::vector<Mark>& marks) {
  constexpr double kLine = 12;
  std::ranges::sort(marks, [](const Mark& a, const Mark& b) {
    return std::pair(a.x, a.y) < std::pair(b.x, b.y);
  });
  for (size_t begin = 0, end; begin < marks.size(); begin = end) {
    double lowest = -INFINITY, moved = 0;
    for (end = begin; end < marks.size() && marks[end].x == marks[begin].x; ++end) {
      Mark& mark = marks[end];
      mark.label_y = lowest = std::max(mark.y, lowest + kLine);
      moved = std::max(moved, mark.label_y - mark.y);
    }
    for (size_t i = begin; i < end; ++i) marks[i].label_y -= moved / 2;
  }
}

}  // namespace

std::string Sweep::svg() const {
  constexpr double kWidth = 1000, kHeight = 640, kLeft = 90, kBottom = 80, kTop = 50, kRight = 150;
  double fewest = INFINITY, widest = 0, minimum = INFINITY, maximum = -INFINITY;
  // Logarithmic scale of rises in percent, clamped to 0.001 %.
  const auto height_of = [&](const SweepPoint& p) {
    return std::log10(std::max(1e-3, 100 * rise(p)));
  };
  std::string exact;
  for (const SweepPoint& p : points) {
    const double sent = bytes_per_token(p);
    if (p.wire.is_exact()) {
      exact += fmt::format("{}{} sends {:.0f}", exact.empty() ? "" : ", ", p.wire.describe(), sent);
      continue;
    }
    fewest = std::min(fewest, sent), widest = std::max(widest, sent);
    minimum = std::min(minimum, std::floor(height_of(p)));
    maximum = std::max(maximum, std::ceil(height_of(p)));
  }
  if (maximum <= minimum) maximum = minimum + 1;
  if (widest <= fewest) widest = fewest + 1;
  const auto x_of = [&](double sent) {
    return kLeft + 30 + (sent - fewest) / (widest - fewest) * (kWidth - kLeft - 30 - kRight);
  };
  const auto y_of = [&](double level) {
    return kHeight - kBottom - (level - minimum) / (maximum - minimum) * (kHeight - kBottom - kTop);
  };
  std::string text = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\""
      " font-size=\"13\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n"
      "<text x=\"{2}\" y=\"26\" font-size=\"16\">Rise of bits per byte over what a rank sends for "
      "a token</text>\n",
      kWidth, kHeight, kLeft);
  for (double level = minimum; level <= maximum; ++level) {
    text += fmt::format(
        "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" stroke=\"#ddd\"/>\n"
        "<text x=\"{3}\" y=\"{4:.1f}\" text-anchor=\"end\">{5:g} %</text>\n",
        kLeft, kWidth - 30, y_of(level), kLeft - 8, y_of(level) + 4, std::pow(10, level));
  }
  std::vector<Mark> marks;
  std::set<double> columns;
  for (const SweepPoint& p : points) {
    if (p.wire.is_exact()) continue;
    const double sent = bytes_per_token(p), y = y_of(height_of(p));
    marks.push_back({x_of(sent), y, y, p.wire.describe()});
    columns.insert(sent);
  }
  for (const double sent : columns) {
    text += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n",
                        x_of(sent), kHeight - kBottom + 20, sent);
  }
  text += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">bytes per token</text>\n",
                      (kLeft + kWidth - kRight) / 2, kHeight - 38);
  text += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"#555\">Without a rise: {}.</text>\n", kLeft,
                      kHeight - 14, exact);
  spread_labels(marks);
  for (const Mark& m : marks) {
    text += fmt::format(
        "<line x1=\"{0:.1f}\" y1=\"{1:.1f}\" x2=\"{2:.1f}\" y2=\"{3:.1f}\" stroke=\"#aaa\"/>\n"
        "<circle cx=\"{0:.1f}\" cy=\"{1:.1f}\" r=\"4\" fill=\"#2b62c4\"/>\n"
        "<text x=\"{4:.1f}\" y=\"{5:.1f}\" font-size=\"11\">{6}</text>\n",
        m.x, m.y, m.x + 12, m.label_y, m.x + 14, m.label_y + 4, m.name);
  }
  return text + "</svg>\n";
}

}  // namespace tandem
