#include "engine/report/page_text.h"

#include <vector>

#include "engine/report/page_assets.h"

namespace tandem {
namespace {

/// Script elements of the report and of the live page.
std::string shared_scripts() {
  std::string text;
  for (const std::string_view script : {kPageChartJs, kPageCommon, kPageCurves, kPageRanks,
                                        kPageLattice, kPageSpace, kPageGroups, kPageLinks}) {
    text.append("<script>").append(script).append("</script>\n");
  }
  return text;
}

}  // namespace

std::string fill_page(std::string_view html, std::span<const PageMark> marks) {
  std::string text;
  for (const auto& [mark, replacement] : marks) {
    const size_t at = html.find(mark);
    text.append(html.substr(0, at)).append(replacement);
    html.remove_prefix(at + mark.size());
  }
  return text.append(html);
}

std::string page_head(std::string_view title, std::string_view more) {
  const std::vector<PageMark> marks{
      {"@TITLE@", title}, {"@STYLE@", kPageStyle}, {"@MORE@", more}, {"@TITLE@", title}};
  return fill_page(kPageHead, marks);
}

std::string report_page(const std::string& data) {
  const std::string head = page_head("Tandem report"), scripts = shared_scripts();
  const std::vector<PageMark> marks{{"@HEAD@", head},
                                    {"@CURVES@", kPageCurvesHtml},
                                    {"@RANKSECTION@", kPageRanksHtml},
                                    {"@GROUPSECTION@", kPageGroupsHtml},
                                    {"@LINKSECTION@", kPageLinksHtml},
                                    {"@DATA@", data},
                                    {"@SCRIPTS@", scripts},
                                    {"@TIMELINE@", kPageTimeline},
                                    {"@SCRIPT@", kPageScript}};
  return fill_page(kPageHtml, marks);
}

std::string live_page() {
  const std::string head = page_head("Tandem live"), scripts = shared_scripts();
  const std::vector<PageMark> marks{{"@HEAD@", head},
                                    {"@CURVES@", kPageCurvesHtml},
                                    {"@RANKSECTION@", kPageRanksHtml},
                                    {"@GROUPSECTION@", kPageGroupsHtml},
                                    {"@LINKSECTION@", kPageLinksHtml},
                                    {"@SCRIPTS@", scripts},
                                    {"@SCRIPT@", kLiveScript}};
  return fill_page(kLiveHtml, marks);
}

std::string fit_page(const std::string& data) {
  const std::string head = page_head("Tandem fit");
  const std::vector<PageMark> marks{{"@HEAD@", head},
                                    {"@DATA@", data},
                                    {"@CHARTJS@", kPageChartJs},
                                    {"@COMMON@", kPageCommon},
                                    {"@SCRIPT@", kFitScript}};
  return fill_page(kFitHtml, marks);
}

}  // namespace tandem
