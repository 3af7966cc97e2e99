#include "engine/report/trace/timeline_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string_view>
#include <vector>

namespace tandem {
namespace {

constexpr const char* kIdle = "#eef0f4";
constexpr double kWidth = 1200, kLeft = 96, kRight = kWidth - 14, kTop = 62, kBetweenRanks = 12;

struct Style {
  SpanKind kind;
  const char* color;
  const char* meaning;
};
// In drawing order: later ones cover earlier ones. Passes are not drawn.
constexpr std::array<Style, kSpanKinds - 1> kStyles{
    {{SpanKind::wait, "#d9491e", "waited"},
     {SpanKind::checkpoint, "#c5cbd6", "checkpoint"},
     {SpanKind::data, "#c5cbd6", "input"},
     {SpanKind::compute, "#8fb4ec", "other computation"},
     {SpanKind::gemm, "#2b62c4", "product"},
     {SpanKind::recompute, "#e08a1e", "recomputed"},
     {SpanKind::transfer, "#12947f", "sent"}}};

using Slices = std::vector<std::pair<double, double>>;  // begin and end, us

struct Row {
  std::map<SpanKind, Slices> busy;
  std::vector<Slices> strips;
};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
    }
  }
  return out;
}

std::map<int, Row> make_rows(const RankEvents& rank, std::chrono::nanoseconds zero) {
  const auto us = [&](TimePoint t) { return double((t - rank.origin - zero).count()) / 1e3; };
  const std::vector<int> lanes = lane_rows(rank.events);
  std::map<int, Row> rows;
  for (size_t i = 0; i < rank.events.size(); ++i) {
    const SpanEvent& event = rank.events[i];
    if (event.kind == SpanKind::pass) continue;
    Row& row = rows[event.processor];
    if (event.kind == SpanKind::transfer) {
      row.strips.resize(std::max(row.strips.size(), size_t(lanes[i]) + 1));
    }
    Slices& slices =
        event.kind == SpanKind::transfer ? row.strips[size_t(lanes[i])] : row.busy[event.kind];
    slices.emplace_back(us(event.begin), us(event.end));
  }
  return rows;
}

/// `maximum` multiprocessors, evenly spread, and the row without one.
std::vector<int> sample(const std::map<int, Row>& rows, int maximum) {
  std::vector<int> processors, shown;
  for (const auto& [processor, row] : rows)
    (processor < 0 ? shown : processors).push_back(processor);
  const size_t count = std::min(processors.size(), size_t(std::max(maximum, 0)));
  for (size_t i = 0; i < count; ++i) shown.push_back(processors[i * processors.size() / count]);
  return shown;
}

double tick(double span) {
  const double raw = span / 10, power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10 * power;
}

class Picture {
 public:
  explicit Picture(double span) : span_(span) {}

  void slices(const Slices& slices, double y, double height, const char* color) {
    if (slices.empty()) return;
    body_ += "<path fill=\"" + std::string(color) + "\" d=\"";
    for (const auto& [begin, end] : slices) {
      const double width = x(end) - x(begin);
      body_ += fmt::format("M{:.1f} {:g}h{:.1f}v{:g}H{:.1f}z", x(begin), y,
                           std::max(width > 3 ? width - 0.5 : width, 0.3), height, x(begin));
    }
    body_ += "\"/>\n";
  }
  void lane(double y, double height) {
    body_ += fmt::format(R"(<rect x="{:g}" y="{:g}" width="{:g}" height="{:g}" fill="{}"/>)", kLeft,
                         y, kRight - kLeft, height, kIdle) +
             "\n";
  }
  void text(double at, double y, const char* style, const std::string& words) {
    body_ +=
        fmt::format("<text x=\"{:.1f}\" y=\"{:g}\" {}>{}</text>\n", at, y, style, escaped(words));
  }
  /// Returns the x position of the next entry.
  double key(double at, const char* color, std::string_view meaning) {
    body_ += fmt::format(R"(<rect x="{:g}" y="34" width="12" height="10" fill="{}"/>)", at, color);
    text(at + 17, 43, "", std::string(meaning));
    return at + 45 + 6.2 * double(meaning.size());
  }
  void axis(double bottom) {
    if (!(span_ > 0)) return;
    const double step = tick(span_), unit = step >= 1000 ? 1000 : 1;
    std::string lines;
    for (int i = 0; i * step <= span_ * 1.0001; ++i) {
      lines += fmt::format("M{:.1f} {:g}V{:g}", x(i * step), kTop - 6, bottom);
      const char* anchor =
          x(i * step) > kRight - 20 ? "text-anchor=\"end\"" : "text-anchor=\"middle\"";
      text(x(i * step), bottom + 14, anchor,
           i == 0 ? "0" : fmt::format("{:g} {}", i * step / unit, unit > 1 ? "ms" : "µs"));
    }
    body_ += "<path stroke=\"#5b6474\" stroke-opacity=\".25\" d=\"" + lines + "\"/>\n";
  }
  std::string svg(double height) const {
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1:g}\" width=\"{0:g}\" "
        "height=\"{1:g}\" font-family=\"system-ui, sans-serif\" font-size=\"11\" "
        "fill=\"#161a22\">\n<rect width=\"{0:g}\" height=\"{1:g}\" fill=\"#ffffff\"/>\n{2}</svg>\n",
        kWidth, height, body_);
  }

 private:
  double x(double us) const { return kLeft + (span_ > 0 ? us / span_ : 0) * (kRight - kLeft); }

  double span_;
  std::string body_;
};

}  // namespace

std::string timeline_svg(std::span<const RankEvents> ranks, const PictureOptions& options) {
  auto zero = std::chrono::nanoseconds::max(), last = std::chrono::nanoseconds::min();
  std::array<bool, kSpanKinds> used{};
  for (const RankEvents& rank : ranks) {
    for (const SpanEvent& event : rank.events) {
      zero = std::min(zero, event.begin - rank.origin);
      last = std::max(last, event.end - rank.origin);
      used[size_t(event.kind)] = true;
    }
  }
  Picture picture(last > zero ? double((last - zero).count()) / 1e3 : 0);
  picture.text(kLeft, 20, "font-size=\"15\" font-weight=\"600\"", options.title);
  double key = kLeft, y = kTop;
  for (const Style& style : kStyles) {
    if (used[size_t(style.kind)]) key = picture.key(key, style.color, style.meaning);
  }
  if (last > zero) key = picture.key(key, kIdle, "idle or not recorded");
  size_t maximum = 0, shown = 0;
  for (const RankEvents& rank : ranks) {
    const std::map<int, Row> rows = make_rows(rank, zero);
    picture.text(8, y + 10, "font-weight=\"600\"", fmt::format("rank {}", rank.rank));
    const std::vector<int> some = sample(rows, options.processors);
    const size_t processors = rows.size() - rows.count(-1);
    if (processors > maximum) maximum = processors, shown = some.size() - rows.count(-1);
    for (const int processor : some) {
      const Row& row = rows.at(processor);
      const double busy = processor < 0 ? 22 : 9, strip = processor < 0 ? 9 : 3;
      if (!row.busy.empty()) picture.lane(y, busy);
      for (const Style& style : kStyles) {
        const auto found = row.busy.find(style.kind);
        if (found == row.busy.end()) continue;
        // Recomputation underlines the spans that it contains.
        const double height = style.kind == SpanKind::recompute ? busy / 5 : busy;
        picture.slices(found->second, y + busy - height, height, style.color);
      }
      if (processor >= 0) {
        picture.text(kLeft - 6, y + 8, "text-anchor=\"end\" font-size=\"8\" fill=\"#5b6474\"",
                     fmt::format("SM {}", processor));
      }
      if (!row.busy.empty()) y += busy + 1;
      for (const Slices& slices : row.strips) {
        picture.slices(slices, y, strip, kStyles.back().color);
        y += strip + 1;
      }
      y += 1;
    }
    y += kBetweenRanks;
  }
  picture.axis(y - kBetweenRanks + 2);
  if (shown < maximum) {
    picture.text(key + 20, 43, "fill=\"#5b6474\"",
                 fmt::format("{} of {} multiprocessors of each rank", shown, maximum));
  }
  return picture.svg(y + 14);
}

}  // namespace tandem
