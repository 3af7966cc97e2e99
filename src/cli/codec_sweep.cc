#include "cli/codec_sweep.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "cli/usage.h"
#include "core/machine.h"
#include "core/version.h"
#include "train/codec_search.h"

namespace tandem::cli {

namespace {

constexpr const char* kCaveat =
    "Bits per byte of one model on one text: they prove nothing about the accuracy of large models "
    "in their tasks, and 4 bits are known to break single models.";

nlohmann::ordered_json training_json(const std::optional<TrainingRecord>& training) {
  if (!training) return nullptr;
  nlohmann::ordered_json bytes;
  if (training->bytes_seen) bytes = *training->bytes_seen;
  return {{"seed", training->seed},
          {"steps", training->steps},
          {"bytes_seen", bytes},
          {"command", "tandem train config.toml --out out/model"},
          {"config.toml", training->config}};
}

}  // namespace

std::vector<Wire> sweep_wires() {
  std::vector<Wire> all;
  for (const char* text : {"none",
                           "lossless",
                           "int8",
                           "int8:g64",
                           "int8:g32",
                           "int6",
                           "int6:g64",
                           "int6:g32",
                           "int5",
                           "int5:g64",
                           "int5:g32",
                           "int4",
                           "int4:g64",
                           "int4:g32",
                           "int4:g16",
                           "int4:g32:asym",
                           "int4:g32:hadamard",
                           "int3",
                           "int3:g64",
                           "int3:g32",
                           "int3:g16",
                           "int3:g32:asym",
                           "int3:g32:spikes",
                           "int2",
                           "int2:g64",
                           "int2:g32",
                           "int2:g16",
                           "int2:g32:asym",
                           "int2:g64:asym:spikes",
                           "e4m3",
                           "e4m3:g32",
                           "e5m2",
                           "e5m2:g32",
                           "mxfp8",
                           "mxfp6",
                           "mxfp4"}) {
    all.push_back(Wire::parse(text));
  }
  return all;
}

double Sweep::bytes_per_token(const SweepPoint& point) const {
  return SentBytes{model, ranks, dtype}.of(codec_at(model, sites, point.wire));
}

std::string Sweep::table() const {
  std::string text =
      "| codec | bits per element | bytes sent per token and rank | bits per byte | rise |\n"
      "| --- | --- | --- | --- | --- |\n";
  for (const SweepPoint& point : points) {
    text += fmt::format("| {} | {:.3f} | {:.0f} | {:.4f} | {:+.3f} % |\n", point.wire.describe(),
                        point.wire.bits_per_element(dtype), bytes_per_token(point),
                        point.bits_per_byte, 100 * rise(point));
  }
  return text;
}

std::string Sweep::json() const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const SweepPoint& point : points) {
    rows.push_back({{"codec", point.wire.describe()},
                    {"bits_per_element", point.wire.bits_per_element(dtype)},
                    {"bytes_per_token", bytes_per_token(point)},
                    {"bits_per_byte", point.bits_per_byte},
                    {"rise", rise(point)}});
  }
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  const nlohmann::ordered_json root{
      {"sweep", rows},
      {"caveat", kCaveat},
      {"training", training_json(training)},
      {"sites", sites},
      {"ranks", ranks},
      {"dtype", name_of(dtype)},
      {"bytes", bytes},
      {"model", {{"hidden", model.hidden}, {"layers", model.layers}, {"heads", model.heads}}},
      {"hardware", this_machine().describe()},
      {"commit", kCommit},
      {"command", joined(typed_words())},
      {"date", fmt::format("{:%FT%TZ}", fmt::gmtime(now))}};
  return root.dump(1) + "\n";
}

namespace {

/// A format in the picture.
struct Mark {
  double x = 0, y = 0, label_y = 0;
  std::string name;
};

/// Labels of marks that stand above each other keep a line's distance, as close to their marks as
/// that allows.
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
  double fewest = INFINITY, widest = 0, least = INFINITY, most = -INFINITY;
  // Rises on a logarithmic scale, in percent; what is 0.001 % or less is drawn there.
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
    least = std::min(least, std::floor(height_of(p)));
    most = std::max(most, std::ceil(height_of(p)));
  }
  if (most <= least) most = least + 1;
  if (widest <= fewest) widest = fewest + 1;
  const auto x_of = [&](double sent) {
    return kLeft + 30 + (sent - fewest) / (widest - fewest) * (kWidth - kLeft - 30 - kRight);
  };
  const auto y_of = [&](double level) {
    return kHeight - kBottom - (level - least) / (most - least) * (kHeight - kBottom - kTop);
  };
  std::string text = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\""
      " font-size=\"13\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n"
      "<text x=\"{2}\" y=\"26\" font-size=\"16\">Rise of bits per byte over what a rank sends for "
      "a token</text>\n",
      kWidth, kHeight, kLeft);
  for (double level = least; level <= most; ++level) {
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

}  // namespace tandem::cli
