// Parts of the report's page, embedded into the library by cmake/embed.cmake.
#pragma once

#include <string_view>

namespace tandem {

extern const std::string_view kPageHead, kPageHtml, kPageStyle, kPageCommon, kPageCurves,
    kPageCurvesHtml, kPageRanks, kPageTimeline, kPageScript, kPageChartJs, kPageGroups,
    kPageGroupsHtml, kPageLattice, kPageLinks, kPageLinksHtml, kPageRanksHtml, kPageSpace,
    kLiveHtml, kLiveScript, kFitHtml, kFitScript;

}  // namespace tandem
