#include "engine/report/page_text.h"

#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/report/page_assets.h"

namespace tandem {
namespace {

using Replacement = std::pair<std::string_view, std::string_view>;

/// Replaces marks, in the order of the text, in one pass: a mark inside a replacement is not
/// expanded.
std::string fill(std::string_view html, std::span<const Replacement> replacements) {
  std::string text;
  for (const auto& [mark, replacement] : replacements) {
    const size_t at = html.find(mark);
    text.append(html.substr(0, at)).append(replacement);
    html.remove_prefix(at + mark.size());
  }
  return text.append(html);
}

}  // namespace

std::string report_page(const std::string& data) {
  const std::vector<Replacement> replacements{
      {"@STYLE@", kPageStyle},   {"@DATA@", data},        {"@CHARTJS@", kPageChartJs},
      {"@COMMON@", kPageCommon}, {"@RANKS@", kPageRanks}, {"@TIMELINE@", kPageTimeline},
      {"@SCRIPT@", kPageScript}};
  return fill(kPageHtml, replacements);
}

std::string live_page() {
  const std::vector<Replacement> replacements{
      {"@STYLE@", kPageStyle}, {"@CHARTJS@", kPageChartJs}, {"@COMMON@", kPageCommon},
      {"@RANKS@", kPageRanks}, {"@GROUPS@", kPageGroups},   {"@SCRIPT@", kLiveScript}};
  return fill(kLiveHtml, replacements);
}

}  // namespace tandem
