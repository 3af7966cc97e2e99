#include "engine/report/page_text.h"

#include <vector>

#include "engine/report/page_assets.h"

namespace tandem {

std::string fill_page(std::string_view html, std::span<const PageMark> marks) {
  std::string text;
  for (const auto& [mark, replacement] : marks) {
    const size_t at = html.find(mark);
    text.append(html.substr(0, at)).append(replacement);
    html.remove_prefix(at + mark.size());
  }
  return text.append(html);
}

std::string report_page(const std::string& data) {
  const std::vector<PageMark> marks{{"@STYLE@", kPageStyle},     {"@DATA@", data},
                                    {"@CHARTJS@", kPageChartJs}, {"@COMMON@", kPageCommon},
                                    {"@RANKS@", kPageRanks},     {"@TIMELINE@", kPageTimeline},
                                    {"@SCRIPT@", kPageScript}};
  return fill_page(kPageHtml, marks);
}

std::string live_page() {
  const std::vector<PageMark> marks{{"@STYLE@", kPageStyle},   {"@CHARTJS@", kPageChartJs},
                                    {"@COMMON@", kPageCommon}, {"@RANKS@", kPageRanks},
                                    {"@GROUPS@", kPageGroups}, {"@SCRIPT@", kLiveScript}};
  return fill_page(kLiveHtml, marks);
}

}  // namespace tandem
