#include "engine/plan/schedule_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

namespace tandem {
namespace {

using schedule::PassKind;
using schedule::PassTime;
using schedule::PipelineAction;

constexpr int kRankColumns = 5;
constexpr const char* kRecomputed = "#161a22";

struct PassStyle {
  PassKind pass;
  char letter;  ///< of even chunks; odd ones have the small letter
  std::array<int, 3> color;
  std::string_view meaning;
};
// Indexed by PassKind.
constexpr std::array<PassStyle, 4> kStyles{
    {{PassKind::forward, 'F', {0x2b, 0x62, 0xc4}, "forward"},
     {PassKind::backward, 'B', {0x12, 0x94, 0x7f}, "backward"},
     {PassKind::backward_input, 'I', {0x8a, 0x4f, 0xbf}, "backward, input only"},
     {PassKind::backward_weight, 'W', {0xe0, 0x8a, 0x1e}, "backward, weights"}}};

const PassStyle& style_of(const PipelineAction& action) {
  return kStyles[size_t(action.pass)];
}

std::array<bool, kStyles.size()> used_passes(const PlannedSchedule& plan) {
  std::array<bool, kStyles.size()> used{};
  for (const auto& actions : plan.actions) {
    for (const PipelineAction& action : actions) used[size_t(action.pass)] = true;
  }
  return used;
}

template <typename F>
void for_each_pass(const PlannedSchedule& plan, size_t rank, const F& f) {
  for (size_t i = 0; i < plan.actions[rank].size(); ++i) {
    f(plan.actions[rank][i], plan.times.passes[rank][i]);
  }
}

std::string label_of(const PipelineAction& action) {
  const char letter = style_of(action).letter;
  return fmt::format("{}{}", action.chunk % 2 == 0 ? letter : char(letter + ('a' - 'A')),
                     action.microbatch);
}

/// Time at the begin of a pass in which it computes activations again.
double recompute_time(const PlannedSchedule& plan, const PipelineAction& action) {
  const bool recomputes =
      action.pass == PassKind::backward || action.pass == PassKind::backward_input;
  return recomputes ? plan.costs.recompute : 0;
}

/// Rows of characters, `scale` columns per unit of time.
std::string text_rows(const PlannedSchedule& plan, double scale) {
  const auto column = [&](double time) { return size_t(std::lround(time * scale)); };
  std::string text = "rank\n";
  for (size_t rank = 0; rank < plan.actions.size(); ++rank) {
    std::string row(column(plan.times.makespan), '.');
    for_each_pass(plan, rank, [&](const PipelineAction& action, const PassTime& time) {
      const double again = time.begin + recompute_time(plan, action);
      std::string cell(column(again) - column(time.begin), 'R');
      cell += label_of(action);
      cell.resize(column(time.end) - column(time.begin), ' ');
      row.replace(column(time.begin), cell.size(), cell);
    });
    text += fmt::format("{:>{}} {}\n", rank, kRankColumns - 1, row);
  }
  return text;
}

std::string shade(const PassStyle& style, int chunk, int chunks) {
  const double white = 0.62 * chunk / chunks;  // later chunks are lighter
  std::string color = "#";
  for (const int channel : style.color) {
    color += fmt::format("{:02x}", int(std::lround(channel + white * (255 - channel))));
  }
  return color;
}

}  // namespace

int PlannedSchedule::peak_activations() const {
  return *std::ranges::max_element(times.peak_activations);
}

std::string schedule_text(const PlannedSchedule& plan, int max_columns) {
  const auto& costs = plan.costs;
  const double shortest = std::min({costs.forward, costs.backward_input, costs.backward_weight});
  const int label = 1 + int(std::to_string(plan.shape.microbatches - 1).size());
  for (const int cell : {label + 1, label}) {
    const double scale = cell / shortest;
    if (kRankColumns + plan.times.makespan * scale > max_columns) continue;
    std::string key;
    const auto used = used_passes(plan);
    for (const PassStyle& style : kStyles) {
      if (!used[size_t(style.pass)]) continue;
      key += fmt::format("{}{}: {}", key.empty() ? "" : "; ", style.letter, style.meaning);
    }
    if (costs.recompute > 0) key += "; R: activations computed again";
    return fmt::format("{}\n{}\n{}numbers: microbatches; dots: idle\n", text_rows(plan, scale), key,
                       plan.shape.chunks > 1 ? "small letters: odd chunks; " : "");
  }
  return fmt::format("The picture needs {:.0f} columns, more than {}: --svg FILE draws it.\n",
                     std::ceil(kRankColumns + plan.times.makespan * label / shortest), max_columns);
}

std::string schedule_svg(const PlannedSchedule& plan) {
  constexpr double kWidth = 1200, kLeft = 64, kRight = kWidth - 14, kTop = 62, kRow = 24,
                   kStep = 28;
  const double makespan = plan.times.makespan;
  const auto x = [&](double time) { return kLeft + time / makespan * (kRight - kLeft); };
  const double bottom = kTop + kStep * double(plan.actions.size());
  std::string body = fmt::format(
      "<text x=\"{:g}\" y=\"20\" font-size=\"15\" font-weight=\"600\">{}: {} ranks, {} "
      "microbatches, bubble {:.1f} %, peak {} activations</text>\n",
      kLeft, schedule::name_of(plan.shape.kind), plan.shape.ranks, plan.shape.microbatches,
      100 * plan.times.bubble, plan.peak_activations());
  double key = kLeft;
  const auto add_key = [&](std::string_view meaning) {
    body += fmt::format("<text x=\"{:g}\" y=\"43\">{}</text>\n", key + 5, meaning);
    key += 30 + 6.2 * double(meaning.size());
  };
  const auto add_swatch = [&](std::string_view color) {
    body += fmt::format("<rect x=\"{:g}\" y=\"34\" width=\"12\" height=\"10\" fill=\"{}\"/>\n", key,
                        color);
    key += 12;
  };
  const auto used = used_passes(plan);
  for (const PassStyle& style : kStyles) {
    if (!used[size_t(style.pass)]) continue;
    for (int chunk = 0; chunk < plan.shape.chunks; ++chunk) {
      add_swatch(shade(style, chunk, plan.shape.chunks));
    }
    add_key(style.meaning);
  }
  if (plan.costs.recompute > 0) {
    add_swatch(kRecomputed);
    add_key("activations computed again");
  }
  add_swatch("#eef0f4");
  add_key("idle");
  if (plan.shape.chunks > 1) add_key("lighter: later stages of the rank");
  for (size_t rank = 0; rank < plan.actions.size(); ++rank) {
    const double y = kTop + kStep * double(rank);
    body += fmt::format(
        "<text x=\"8\" y=\"{:g}\" font-weight=\"600\">rank {}</text>\n"
        "<rect x=\"{:g}\" y=\"{:g}\" width=\"{:g}\" height=\"{:g}\" fill=\"#eef0f4\"/>\n",
        y + 16, rank, kLeft, y, kRight - kLeft, kRow);
    for_each_pass(plan, rank, [&](const PipelineAction& action, const PassTime& time) {
      const double begin = x(time.begin), width = x(time.end) - begin;
      body += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{:g}\" width=\"{:.2f}\" height=\"{:g}\" fill=\"{}\"/>\n", begin,
          y, std::max(width > 3 ? width - 0.7 : width, 0.3), kRow,
          shade(style_of(action), action.chunk, plan.shape.chunks));
      if (const double again = recompute_time(plan, action); again > 0) {
        body += fmt::format(
            "<rect x=\"{:.2f}\" y=\"{:g}\" width=\"{:.2f}\" height=\"{:g}\" fill=\"{}\"/>\n", begin,
            y + kRow - 5, x(time.begin + again) - begin, 5.0, kRecomputed);
      }
      const std::string number = std::to_string(action.microbatch);
      if (width < 4 + 6 * double(number.size())) return;
      body += fmt::format(
          "<text x=\"{:.2f}\" y=\"{:g}\" text-anchor=\"middle\" fill=\"{}\">{}</text>\n",
          begin + width / 2, y + 16, 2 * action.chunk >= plan.shape.chunks ? "#161a22" : "#ffffff",
          number);
    });
  }
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1:g}\" width=\"{0:g}\" "
      "height=\"{1:g}\" font-family=\"system-ui, sans-serif\" font-size=\"11\" "
      "fill=\"#161a22\">\n<rect width=\"{0:g}\" height=\"{1:g}\" fill=\"#ffffff\"/>\n{2}</svg>\n",
      kWidth, bottom + 10, body);
}

}  // namespace tandem
